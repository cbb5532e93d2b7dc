// A run: what has come of one stream so far.
export class Run {
  tokens = [];      // { id, text, origin }
  rounds = [];      // as rounds.js reads them
  points = [];      // [seconds since the start, tokens]
  drafted = [];     // drafts that reached each position, and those whose token there was accepted
  accepted = [];
  metrics = null;   // the server's, at the end
  last = null;      // the last choice: finish_reason, seed, lossless, deterministic
  #roundOf = [];

  constructor(drafter, now) {
    this.drafter = drafter;
    this.started = now;
  }

  take(chunk, now) {
    for (const choice of chunk.choices) {
      for (const trace of choice.trace ?? []) this.#takeRound(roundOf(trace));
      for (const { token_id: id, origin, text } of choice.provenance ?? []) this.tokens.push({ id, origin, text: text ?? `[${id}]` });
      if (choice.finish_reason) this.last = choice;
    }
    if (chunk.metrics) this.metrics = chunk.metrics;
    if (chunk.choices.length) this.points.push([(now - this.started) / 1000, this.tokens.length]);
  }

  #takeRound(round) {
    this.rounds.push(round);
    // a ban may take tokens back, and a later round writes them anew
    for (let i = 0; i < round.emitted; i++) this.#roundOf[round.start + i] = this.rounds.length - 1;
    round.draft.forEach((_, j) => {
      this.drafted[j] = (this.drafted[j] ?? 0) + 1;
      this.accepted[j] = (this.accepted[j] ?? 0) + (j < round.accepted);
    });
  }

  roundIndex(token) { return this.#roundOf[token]; }

  get text() { return this.tokens.map((token) => token.text).join(""); }

  // Tokens per second: the server's figure at the end; until then by the chunks since the first one.
  get rate() {
    if (this.metrics) return this.metrics.tokens_per_second;
    const [first, last] = [this.points[0], this.points.at(-1)];
    return first && last[0] > first[0] ? (last[1] - first[1]) / (last[0] - first[0]) : 0;
  }
}

function roundOf(trace) {
  return {
    ...trace,
    draft: trace.draft.map((id, j) => ({ id, text: trace.draft_texts[j] })),
    next: { id: trace.next_token, text: trace.next_text },
    after: trace.after_sibling === null ? null : { id: trace.after_sibling, text: trace.after_text },
    least: trace.rollback === null ? null : Math.exp(-trace.rollback),
  };
}

// Return where two runs differ first; -1 where one is the beginning of the other, or equal to it.
export function difference(one, other) {
  return one.tokens.slice(0, other.tokens.length).findIndex((token, i) =>
    token.id !== other.tokens[i].id || (token.text !== other.tokens[i].text && i + 1 < other.tokens.length));
}
