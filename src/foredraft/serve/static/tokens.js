// The tokens of one run, coloured by their origin; pointer and arrow keys show details.
import { make } from "./dom.js";
import { shown } from "./rounds.js";

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };

export class TokensView {
  #root; #detail; #run = null; #nodes = []; #at = -1;

  constructor(root, detail) {
    this.#root = root;
    this.#detail = detail;
    root.addEventListener("keydown", (event) => this.#move(event));
    for (const kind of ["pointerover", "click"]) {
      root.addEventListener(kind, ({ target }) => {
        if (target.dataset.index !== undefined) this.#select(Number(target.dataset.index));
      });
    }
    root.addEventListener("pointerleave", () => this.#detail.hideSoon());
    root.addEventListener("blur", () => this.#detail.hideSoon());
  }

  begin(run) {
    this.#run = run;
    this.#nodes = [];
    this.#at = -1;
    this.#root.replaceChildren();
  }

  // Append what the run has got since the last call.
  update() {
    const near = this.#root.scrollHeight - this.#root.scrollTop - this.#root.clientHeight < 40;
    for (let index = this.#nodes.length; index < this.#run.tokens.length; index++) {
      const { text, origin } = this.#run.tokens[index];
      const round = this.#run.rounds[this.#run.roundIndex(index)];
      if (round && index === round.start + round.accepted) {
        round.draft.slice(round.accepted).forEach((lost) => this.#root.append(make("span", "wrong", shown(lost.text))));
      }
      const node = make("span", `t ${origin}`, text);
      node.dataset.index = index;
      this.#nodes.push(node);
      this.#root.append(node);
    }
    if (near) this.#root.scrollTop = this.#root.scrollHeight;
  }

  #move(event) {
    const step = STEPS[event.key];
    if (step === undefined || !this.#nodes.length || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const to = this.#at < 0 ? (step === Infinity ? Infinity : 0) : this.#at + step;
    this.#select(Math.max(0, Math.min(this.#nodes.length - 1, to)));
    this.#nodes[this.#at].scrollIntoView({ block: "nearest" });
    this.#detail.show(this.#run, this.#at, this.#nodes[this.#at]);
  }

  #select(index) {
    this.#root.querySelectorAll(".on, .round").forEach((node) => node.classList.remove("on", "round"));
    this.#at = index;
    const round = this.#run.roundIndex(index);
    this.#nodes.forEach((node, i) => node.classList.toggle("round", round !== undefined && this.#run.roundIndex(i) === round));
    this.#nodes[index].classList.add("on");
    this.#detail.show(this.#run, index, this.#nodes[index]);
  }
}
