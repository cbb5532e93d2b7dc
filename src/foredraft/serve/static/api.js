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

// Yield the chunks of a request, which is a chat if it has messages.
export async function* stream(request, key, signal) {
  const path = request.messages ? "v1/chat/completions" : "v1/completions";
  const response = await call(path, {
    method: "POST", signal,
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...request, stream: true, provenance: true }),
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "The stream broke off.");
}
