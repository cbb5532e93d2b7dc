// What a round says to people. The trace page and the page of the server share it.
export function shown(text) {
  if (text === "") return "(no text)";
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·");
}
export function chance(x) {
  if (x === null || x === undefined) return "";
  return x === 0 ? "0" : x === 1 ? "1" : x < 0.001 ? x.toExponential(1) : x.toFixed(3);
}
// The target adds a token unless the text ended within the draft; a banned word may remove the whole round.
export const ownToken = (round) => !round.discarded && (round.emitted > round.accepted || round.emitted < 0);
export const wholeDraft = (round) => round.draft.length > 0 && round.accepted === round.draft.length;
export function decision(round) {
  const drafted = round.draft.length;
  if (round.discarded) return "The target's logits for this draft were not finite: the draft was discarded, and the next step is plain.";
  if (round.budget === 0) return "The policy took a plain step: nothing was drafted.";
  const stopped = drafted < round.budget ? `; the draft ended after ${drafted}` : "";
  const lossy = round.least === null ? "" :
    ` Not lossless: drafted tokens with a target probability of at least ${chance(round.least)} are accepted.`;
  return `The policy allowed ${round.budget} drafted tokens${stopped}; ${round.accepted} of ${drafted} were accepted, and ${round.emitted} tokens emitted.${lossy}`;
}
// Return the candidates of a round in order: [token, p, q, outcome, tokens allowed]; the last one only under a constraint.
export function candidates(round) {
  const allowed = (j) => round.legal === null ? [] : [j < round.legal.length ? String(round.legal[j]) : ""];
  const rows = round.draft.map((token, j) => {
    const kept = j < round.accepted;
    const outcome = round.discarded ? "discarded" : kept ? "accepted" : j === round.accepted ? "rejected" : "after a rejection";
    return [token, round.p[j], round.q[j], outcome, ...allowed(j)];
  });
  if (ownToken(round)) {
    const outcome = wholeDraft(round) ? "bonus" : round.after ? "sibling" : round.draft.length ? "correction" : "plain";
    const own = [[round.next, round.next_p, null, outcome, ...allowed(round.accepted)]];
    if (round.after) own.push([round.after, null, null, "bonus", ...(round.legal === null ? [] : [""])]);
    rows.splice(round.accepted, 0, ...own);
  }
  return rows;
}
