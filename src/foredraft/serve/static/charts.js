// The charts: SVG made by DOM calls. Each has its values in its label, for people who cannot see it.
import { draw } from "./dom.js";
import { wholeDraft } from "./rounds.js";

const NARROWEST = 4;  // pixels of a token or a round

function canvas(root, label) {
  const [width, height] = [Math.max(120, root.clientWidth), Math.max(80, root.clientHeight)];
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  root.replaceChildren(svg);
  return [svg, width, height];
}

// Tokens over time: one line a run, steeper is faster.
export function race(root, runs) {
  const ends = runs.map((run) => run.points.at(-1) ?? [0, 0]);
  const seconds = Math.max(0.001, ...ends.map(([x]) => x));
  const most = Math.max(1, ...ends.map(([, y]) => y));
  const values = runs.map((run, i) => `${run.drafter}: ${ends[i][1]} tokens in ${ends[i][0].toFixed(2)} s`).join("; ");
  const [svg, width, height] = canvas(root, `Tokens over time. ${values}`);
  const [x, y] = [(s) => 30 + s / seconds * (width - 36), (n) => height - 18 - n / most * (height - 28)];
  svg.append(draw("path", { class: "axis", d: `M30 ${y(0)}H${width - 6}`, fill: "none" }),
    draw("text", { x: 26, y: y(most) + 4, "text-anchor": "end" }, most), draw("text", { x: 26, y: y(0), "text-anchor": "end" }, 0),
    draw("text", { x: width - 6, y: height - 4, "text-anchor": "end" }, `${seconds.toFixed(2)} s`));
  runs.forEach((run, i) => {
    const points = [[0, 0], ...run.points].map(([s, n]) => `${x(s).toFixed(1)} ${y(n).toFixed(1)}`);
    svg.append(draw("path", { class: i ? "line right" : "line", d: `M${points.join("L")}` }));
  });
}

// Share of accepted tokens at each position, of the drafts that reached it.
export function positions(root, run) {
  const shares = run.drafted.map((all, j) => run.accepted[j] / all);
  const values = shares.map((share, j) => `position ${j + 1}: ${run.accepted[j]} of ${run.drafted[j]}`).join("; ");
  const [svg, width, height] = canvas(root, `Acceptance by position. ${values || "Nothing was drafted."}`);
  const step = Math.min(54, width / Math.max(1, shares.length));
  const room = height - 34;
  shares.forEach((share, j) => {
    const [left, wide] = [j * step + step * 0.15, step * 0.7];
    svg.append(draw("rect", { class: "track", x: left, y: 16, width: wide, height: room, rx: 3 }),
      draw("rect", { class: "accepted", x: left, y: 16 + room * (1 - share), width: wide, height: room * share, rx: 3 }));
    const label = (text, y, kind) => svg.append(draw("text", { class: kind, x: left + wide / 2, y, "text-anchor": "middle" }, text));
    if (j % Math.ceil(36 / step) === 0) label(`${Math.round(100 * share)}%`, 11, "value");  // so wide are four characters
    if (j % Math.ceil(20 / step) === 0) label(j + 1, height - 4, "");
  });
  if (!shares.length) svg.append(draw("text", { x: 0, y: height / 2 }, "Nothing was drafted."));
}

// One column a round, from the bottom up: accepted tokens, the target's own one, rejected ones.
export function rounds(root, run) {
  const drafts = run.rounds.map((round) => round.draft.length);
  const total = drafts.reduce((sum, length) => sum + length, 0);
  const near = root.scrollWidth - root.scrollLeft - root.clientWidth < 40;
  const [svg, room, height] = canvas(root, `Draft length by round. ${drafts.length} rounds, ${total} drafted tokens`);
  const column = Math.max(NARROWEST, Math.min(14, room / Math.max(1, drafts.length)));
  const width = Math.max(room, column * drafts.length);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.width = `${width}px`;  // wider than the card: it scrolls
  const pattern = draw("pattern", { id: "hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(draw("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 4 }));
  const defs = draw("defs");
  defs.append(pattern);
  svg.append(defs);
  const unit = Math.min(14, height / Math.max(2, ...drafts.map((length) => length + 1)));
  run.rounds.forEach((round, i) => {
    const lost = round.draft.length - round.accepted;
    const parts = [["accepted", round.accepted], [wholeDraft(round) ? "own bonus" : "own", 1], ["rejected", lost]];
    let base = height;
    const bar = (kind, tall) => svg.append(draw("rect", { class: kind, x: i * column, y: base -= tall, width: column * 0.82, height: tall * 0.86, rx: 1 }));
    for (const [kind, count] of parts) {
      if (unit >= NARROWEST) for (let j = 0; j < count; j++) bar(kind, unit);
      else if (count) bar(kind, Math.max(1, count * unit));  // a token by itself would be a line
    }
  });
  if (near) root.scrollLeft = root.scrollWidth;
}
