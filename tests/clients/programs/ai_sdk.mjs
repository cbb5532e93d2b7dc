// The AI SDK drives a server through two of its providers: text, streams, objects, tools, errors.
// node ai_sdk.mjs http://127.0.0.1:8000, with what the library says as JSON on the standard input.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const want = JSON.parse(readFileSync(0, "utf8"));
const providers = [
  createOpenAICompatible({ name: "here", baseURL: `${url}/v1`, supportsStructuredOutputs: true }),
  createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" }),
];
const prompt = "def add(a, b):";

for (const provider of providers) {
  const given = { model: provider("demo"), prompt, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
  const whole = await generateText(given);
  assert.equal(whole.text, want.text);
  assert.equal(whole.finishReason, "length");
  assert.equal(whole.usage.outputTokens, 24);
  let streamed = "";
  for await (const piece of streamText(given).textStream) streamed += piece;
  assert.equal(streamed, want.text);

  // A record is propertyNames in the schema.
  const inputSchema = z.object({ a: z.enum(["x", "y"]), more: z.record(z.string(), z.string()).optional() });
  const tools = { save: tool({ description: "Save.", inputSchema }) };
  const called = await generateText({ ...given, tools, toolChoice: "required", maxOutputTokens: 200 });
  assert.equal(called.toolCalls[0].toolName, "save");
  assert.ok(["x", "y"].includes(called.toolCalls[0].input.a));

  const wrong = await generateText({ ...given, prompt: "x = 1\n".repeat(1000) }).catch((error) => error);
  assert.ok(APICallError.isInstance(wrong));
  assert.equal(wrong.statusCode, 400);
  assert.match(wrong.message, /maximum context length|prompt is too long/);
}

const output = Output.object({ schema: z.object({ a: z.enum(["x", "y"]) }) });
const made = await generateText({
  model: providers[0]("demo"), prompt, output, maxOutputTokens: 100, maxRetries: 0,
});
assert.ok(["x", "y"].includes(made.output.a));
