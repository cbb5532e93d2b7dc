// The form: from its controls to a request, and back from what the model can do.
import { byId, make } from "./dom.js";

const NUMBERS = ["max_tokens", "temperature", "seed", "top_p", "top_k", "min_p", "repetition_penalty"];
const LISTS = ["stop", "ban"];

export class Form {
  #history = [];  // messages of the conversation so far

  constructor() {
    byId("modes").addEventListener("change", () => this.#showMode());
    byId("forget").addEventListener("click", () => this.#remember([]));
  }

  // Fit the controls to the model.
  adapt(capabilities) {
    // The page has no prediction to give.
    const own = Object.keys(capabilities.drafters).filter((name) => name !== "prediction");
    const names = [...new Set(["none", capabilities.default_drafter ?? "none", ...own])];  // the default may be "auto"
    for (const side of ["left", "right"]) {
      byId(`drafter-${side}`).replaceChildren(...names.map((name) => {
        const lossy = capabilities.drafters[name]?.lossless === false;
        const option = make("option", "", name === "none" ? "none (plain)" : lossy ? `${name} (not lossless)` : name);
        option.value = name;
        return option;
      }));
    }
    byId("drafter-left").value = "none";
    byId("drafter-right").value = capabilities.default_drafter ?? names.at(-1);
    byId("modes").hidden = !capabilities.chat;
    byId(capabilities.chat && this.chat ? "mode-chat" : "mode-prompt").checked = true;
    this.#showMode();
  }

  get chat() { return byId("mode-chat").checked; }
  get key() { return byId("key").value.trim(); }
  get together() { return byId("together").checked; }
  get drafters() { return [byId("drafter-left").value, byId("drafter-right").value]; }

  // Return the fields of a request that both sides share; a seed is always among them.
  request(model) {
    const fields = { model };
    if (byId("seed").value === "") byId("seed").value = Math.floor(Math.random() * 2 ** 31);
    for (const name of NUMBERS) {
      if (byId(name).value !== "") fields[name] = Number(byId(name).value);
    }
    for (const name of LISTS) {
      const lines = byId(name).value.split("\n").filter((line) => line !== "");
      if (lines.length) fields[name] = lines;
    }
    if (!this.chat) return { ...fields, prompt: byId("prompt").value };
    const system = byId("system").value ? [{ role: "system", content: byId("system").value }] : [];
    return { ...fields, messages: [...system, ...this.#history, { role: "user", content: byId("prompt").value }] };
  }

  // Let the conversation go on behind an answer.
  answered(text) {
    if (!this.chat) return;
    this.#remember([...this.#history, { role: "user", content: byId("prompt").value }, { role: "assistant", content: text }]);
    byId("prompt").value = "";
  }

  #remember(messages) {
    this.#history = messages;
    byId("forget").hidden = !messages.length;
    byId("history").replaceChildren(...messages.map(({ role, content }) => make("li", role, content)));
  }

  #showMode() {
    byId("chat").hidden = !this.chat;
    byId("prompt-label").textContent = this.chat ? "Your message" : "Prompt";
  }
}
