// Draws a plot as SVG, at its displayed width so that text is not distorted.

import { element, shape } from "../parts/dom.js";

const SPANS_S = [60, 120, 300, 600]; // a plot uses the shortest span that holds all samples, or the longest one
const HEIGHT = 170;
const LEFT = 44;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const NUM_HUES = 4;
const DOT = 2.5;

function roundUp(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * unit).find((candidate) => candidate >= value);
}

// Returns runs of [x, y] without a gap. A sample without a value ends a run, unless values are rare (`isSparse`).
function runs(points, isSparse) {
  const found = [[]];
  for (const point of points) {
    if (point[1] !== null) found.at(-1).push(point);
    else if (!isSparse && found.at(-1).length) found.push([]);
  }
  return found.filter((run) => run.length);
}

function drawLine(picture, points, hue, name, { isSparse, bottom }) {
  const parts = runs(points, isSparse);
  const path = parts.map((run) => run.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("")).join("");
  if (!isSparse) {
    const area = parts.filter((run) => run.length > 1).map((run) => `M${run[0][0].toFixed(1)} ${bottom}${run.map(([x, y]) => `L${x.toFixed(1)} ${y.toFixed(1)}`).join("")}L${run.at(-1)[0].toFixed(1)} ${bottom}Z`);
    picture.append(shape("path", { class: `fill hue${hue}`, d: area.join("") }));
  }
  picture.append(shape("path", { class: `line hue${hue}${isSparse ? " thin" : ""}`, d: path, "data-line": name }));
  // A single sample has no line, so it gets a dot.
  for (const run of parts) {
    if (isSparse || run.length === 1) for (const [x, y] of run) picture.append(shape("circle", { class: `dot hue${hue}`, cx: x.toFixed(1), cy: y.toFixed(1), r: DOT }));
  }
}

// Fills `node` with a plot. `lines` are [name, function from a sample to a value or null], `top` is a fixed end of the scale.
export function drawPlot(node, samples, { title, text, lines, top, hue = 0, isSparse = false }) {
  const width = Math.max(200, node.clientWidth - 32);
  const now = samples.at(-1).time;
  const span = SPANS_S.find((seconds) => samples[0].time > now - seconds) ?? SPANS_S.at(-1);
  const shown = samples.filter((sample) => sample.time > now - span);
  const values = lines.map(([, of]) => shown.map((sample) => [sample.time, of(sample) ?? null]));
  const limit = top ?? roundUp(Math.max(...values.flat().map(([, value]) => value ?? 0)));
  const x = (time) => LEFT + ((time - now + span) / span) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - Math.min(value, limit) / limit) * (HEIGHT - BOTTOM - TOP);
  const latest = lines.map(([name], index) => [name, values[index].findLast(([, value]) => value !== null)?.[1]]);
  const said = latest.map(([name, value]) => `${name} ${value === undefined ? "none" : text(value) || value}`).join(", ");
  const picture = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${said}` });
  for (const share of [0, 0.5, 1]) {
    picture.append(shape("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(share * limit), y2: y(share * limit) }));
    picture.append(shape("text", { x: LEFT - 8, y: y(share * limit) + 4, "text-anchor": "end" }, text(share * limit)));
  }
  picture.append(shape("text", { x: LEFT, y: HEIGHT - 3 }, `${span / 60} min ago`));
  picture.append(shape("text", { x: width - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
  values.forEach((points, index) => {
    const scaled = points.map(([time, value]) => [x(time), value === null ? null : y(value)]);
    drawLine(picture, scaled, (hue + index) % NUM_HUES, lines[index][0], { isSparse, bottom: y(0) });
  });
  const keys = latest.map(([name, value], index) =>
    element("span", { className: `key hue${(hue + index) % NUM_HUES}` }, element("b", {}, value === undefined ? "–" : text(value) || String(value)), lines.length > 1 ? ` ${name}` : ""),
  );
  node.replaceChildren(element("figcaption", {}, element("span", {}, title), ...keys), picture);
}
