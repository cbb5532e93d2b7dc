// OpenAI's client for Node drives a server, and prints what it got as one line of JSON.
// node openai_node.js http://127.0.0.1:8000/v1 STOP
const { OpenAI } = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "def add(a, b):" }];
const common = { model: "demo", temperature: 0, max_tokens: 24 };

async function refusal(body) {
  try {
    await client.chat.completions.create({ ...common, messages, ...body });
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, param: error.param, code: error.code };
  }
}

async function main() {
  const found = {};
  const whole = await client.chat.completions.create({ ...common, messages, logprobs: true, top_logprobs: 2 });
  found.whole = whole.choices[0].message.content;
  found.scores = whole.choices[0].logprobs.content.map((each) => [each.logprob, each.top_logprobs.length]);
  found.usage = whole.usage;

  found.streamed = "";
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...common, ...options, messages })) {
    found.streamed += chunk.choices[0]?.delta?.content ?? "";
    found.streamedUsage = chunk.usage ?? found.streamedUsage;
    found.reason = chunk.choices[0]?.finish_reason ?? found.reason;
  }

  const stopped = await client.completions.create({ ...common, prompt: "def add(a, b):", stop: process.argv[3] });
  found.stopped = [stopped.choices[0].text, stopped.choices[0].finish_reason];

  const response = await client.responses.create({
    model: "demo", temperature: 0, max_output_tokens: 24, input: "def add(a, b):",
  });
  found.response = response.output_text;

  const long = { model: "demo", messages, max_tokens: 400, ignore_eos: true, stream: true };
  for await (const _ of await client.chat.completions.create(long)) break; // leaves in the middle

  found.wrong = [await refusal({ temperature: -1 }), await refusal({ model: "nope" })];
  found.models = [];
  for await (const model of client.models.list()) found.models.push(model.id);
  console.log(JSON.stringify(found));
}

main();
