// The details of one token: its round, and the p, q and outcome of each candidate.
import { byId, make } from "./dom.js";
import { ORIGINS } from "./origins.js";
import { candidates, chance, decision, shown } from "./rounds.js";

export class Detail {
  #root = byId("detail");
  #hiding = 0;

  constructor() {
    this.#root.addEventListener("pointerenter", () => clearTimeout(this.#hiding));
    this.#root.addEventListener("pointerleave", () => this.hideSoon());
  }

  get open() { return !this.#root.hidden; }

  show(run, index, node) {
    clearTimeout(this.#hiding);
    const token = run.tokens[index];
    const at = run.roundIndex(index);
    const title = make("p");
    title.append(make("strong", "", `Token ${index + 1}: `), make("span", `t ${token.origin}`, shown(token.text)), ` ${ORIGINS[token.origin]}`);
    this.#root.replaceChildren(title);
    if (at !== undefined) this.#root.append(...this.#round(run.rounds[at], at, index));
    this.#root.hidden = false;
    this.#place(node.getClientRects()[0] ?? node.getBoundingClientRect());
  }

  #round(round, at, index) {
    const by = round.drafter === null || !round.draft.length ? "plain step" : `drafted by ${round.drafter}`;
    const table = make("table");
    const head = make("tr");
    const names = ["token", "id", "p (target)", "q (drafter)", "outcome", ...(round.legal === null ? [] : ["tokens allowed"])];
    names.forEach((name) => head.append(make("th", "", name)));
    table.append(head);
    candidates(round).forEach(([token, p, q, ...cells], j) => {
      const row = make("tr", j === index - round.start ? "here" : "");
      row.append(make("td", "token", shown(token.text)));
      [token.id, chance(p), chance(q), ...cells].forEach((cell) => row.append(make("td", "", cell)));
      table.append(row);
    });
    return [make("p", "", `Round ${at + 1}, ${by}. ${decision(round)}`), table];
  }

  // Below the token, or above it where there is more room; on a phone the style sheet puts it at the bottom.
  #place(box) {
    const { offsetWidth: width, offsetHeight: height } = this.#root;
    const below = box.bottom + 8 + height < innerHeight || box.top < innerHeight - box.bottom;
    this.#root.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.#root.style.top = `${Math.max(8, below ? box.bottom + 8 : box.top - 8 - height)}px`;
  }

  hide() { this.#root.hidden = true; }

  // A pointer has time to move from the token into the details.
  hideSoon() {
    clearTimeout(this.#hiding);
    this.#hiding = setTimeout(() => this.hide(), 250);
  }
}
