// Server-sent events of a response, wherever the network cuts its bytes: within a line, an event, a character.
export class EventParser {
  #decoder = new TextDecoder();
  #rest = "";
  #data = [];

  // Take some bytes; return the data of the events that they complete.
  push(bytes) {
    const lines = (this.#rest + this.#decoder.decode(bytes, { stream: true })).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }  // comments and other fields mean nothing here
    }
    return events;
  }
}

export async function* events(body) {
  const parser = new EventParser();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
