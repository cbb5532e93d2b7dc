// The speed-up: the ratios of runs in turns, as a median with its quartiles.
const quantile = (sorted, share) => {
  const at = share * (sorted.length - 1);
  const low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
};

export class Ratios {
  #all = [];
  #ended = false;

  add(ratio) { if (Number.isFinite(ratio) && ratio > 0) this.#all.push(ratio); }

  end() { this.#ended = true; }

  get #quartiles() {
    const sorted = [...this.#all].sort((a, b) => a - b);
    return [0.25, 0.5, 0.75].map((share) => quantile(sorted, share));
  }

  // What stands in large letters: a number only where it says more than noise does.
  get figure() {
    if (this.#all.length < 2) return "–";
    const [lower, median, upper] = this.#quartiles;
    return lower <= 1 && 1 <= upper ? "no difference" : `${median.toFixed(2)}×`;
  }

  get note() {
    if (this.#all.length < 2) return this.#ended ? "speed-up: not measured" : "speed-up: measured after both texts";
    const [lower, median, upper] = this.#quartiles.map((each) => each.toFixed(2));
    return `speed-up, right against left: ${median} (${lower} to ${upper}) in ${this.#all.length} turns`;
  }
}
