// The client of the public API. Every failure is an ApiError with one line for people.
import { events } from "./sse.js";

export class ApiError extends Error {
  constructor(status, message) {
    super(message.replace(/\s+/g, " "));
    this.status = status;
  }
}

const headers = (key) => key ? { Authorization: `Bearer ${key}` } : {};

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `The server answers ${response.status}.`);
}

export async function capabilities(key) {
  return (await call("v1/capabilities", { headers: headers(key) })).json();
}

// Yield the chunks of a request, which is a chat if it has messages; traced: with the origins of its tokens.
export async function* stream(request, key, signal, traced = true) {
  const path = request.messages ? "v1/chat/completions" : "v1/completions";
  const response = await call(path, {
    method: "POST", signal,
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...request, stream: true, provenance: traced }),
  });
  const reader = events(response.body);
  for (;;) {
    const { value: data, done } = await reader.next().catch((error) => {
      throw error.name === "AbortError" ? error : gone();
    });
    if (done) throw gone();
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
}

const gone = () => new ApiError(0, "The server is gone. What it had written stays here.");

// Return the tokens per second of a request, by the server's own clock.
export async function rate(request, key, signal) {
  let found = 0;
  for await (const chunk of stream(request, key, signal, false)) found = chunk.metrics?.tokens_per_second ?? found;
  return found;
}
