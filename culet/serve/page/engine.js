// Fills the Engine tab with current figures, plots of the last few minutes, and the attention plan.

import { call } from "./api.js";
import { element } from "./markdown.js";

const SPANS_S = [60, 120, 300]; // a plot uses the shortest span that holds all samples, or the longest one
const PERIOD_MS = 1000;
const HEIGHT = 160;
const LEFT = 44;
const BOTTOM = 18;
const SVG = "http://www.w3.org/2000/svg";

let samples = [];
let timer = 0;
let isPlanShown = false;

const rate = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)}k` : value.toFixed(value < 10 ? 1 : 0));
const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;

// Each plot has a title, a formatter for values, and lines given as [name, function from a sample to a value or null].
function plots() {
  const newest = samples.at(-1);
  const groups = Object.keys(newest?.kv_groups ?? {});
  const specs = [
    { title: "Tokens per second", text: rate, lines: [["out", (s) => s.output_tokens_per_s], ["in", (s) => s.prompt_tokens_per_s]] },
    { title: "Time to first token, ms", text: rate, lines: [["median", (s) => s.ttft_ms]] },
    { title: "Requests", text: (value) => (Number.isInteger(value) ? String(value) : ""), lines: [["running", (s) => s.running], ["waiting", (s) => s.waiting]] },
    {
      title: "KV cache in use",
      text: percent,
      top: 1,
      lines: [...groups.map((name) => [name, (s) => s.kv_groups[name]]), ["reusable", (s) => s.kv_reusable]],
    },
  ];
  if (samples.some((s) => s.tokens_per_verify !== null && s.tokens_per_verify !== undefined)) {
    specs.push({ title: "Tokens per verify", text: (value) => value.toFixed(2), lines: [["mean", (s) => s.tokens_per_verify]] });
  }
  return specs;
}

function shape(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function roundUp(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= value);
}

// Draws a plot at its displayed width, so that text is not distorted.
function drawPlot({ title, text, lines, top }) {
  const width = document.querySelector(".plot svg")?.clientWidth || 500;
  const now = samples.at(-1).time;
  const span = SPANS_S.find((seconds) => samples[0].time > now - seconds) ?? SPANS_S.at(-1);
  const shown = samples.filter((sample) => sample.time > now - span);
  const values = lines.map(([, of]) => shown.map((sample) => [sample.time, of(sample) ?? null]));
  const limit = top ?? roundUp(Math.max(...values.flat().map(([, value]) => value ?? 0)));
  const x = (time) => LEFT + ((time - now + span) / span) * (width - LEFT);
  const y = (value) => 6 + (1 - value / limit) * (HEIGHT - BOTTOM - 6);
  const picture = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const share of [0, 0.5, 1]) {
    picture.append(shape("line", { class: "rule", x1: LEFT, x2: width, y1: y(share * limit), y2: y(share * limit) }));
    picture.append(shape("text", { x: LEFT - 6, y: y(share * limit) + 4, "text-anchor": "end" }, text(share * limit)));
  }
  picture.append(shape("text", { x: LEFT, y: HEIGHT - 3 }, `${span / 60} min ago`));
  picture.append(shape("text", { x: width, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
  values.forEach((points, index) => {
    let path = "";
    let isOpen = false; // a sample without a value breaks the line
    for (const [time, value] of points) {
      if (value !== null) path += `${isOpen ? "L" : "M"}${x(time).toFixed(1)} ${y(Math.min(value, limit)).toFixed(1)}`;
      isOpen = value !== null;
    }
    picture.append(shape("path", { class: `hue${index % 4}`, d: path, "data-line": lines[index][0] }));
  });
  const keys = lines.map(([name], index) => {
    const last = values[index].findLast(([, value]) => value !== null);
    return element("span", { className: `key hue${index % 4}` }, `${name} ${last ? text(last[1]) : "–"}`);
  });
  return element("figure", { className: "plot" }, element("figcaption", {}, title, ...keys), picture);
}

function figure(value, name) {
  return element("div", {}, element("b", {}, value), element("span", {}, name));
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function draw(latest) {
  const newest = samples.at(-1);
  document.getElementById("figures").replaceChildren(
    figure(rate(newest.output_tokens_per_s), "tokens/s now"),
    figure(latest.totals.requests.toLocaleString(), "requests answered"),
    figure(latest.totals.output_tokens.toLocaleString(), "tokens generated"),
    figure(percent(latest.totals.prefix_hit_share), "of prompt tokens reused"),
    figure(latest.totals.preemptions.toLocaleString(), "preemptions"),
    figure(duration(latest.uptime_s), "uptime"),
  );
  const container = document.getElementById("plots");
  const isFirst = !container.childElementCount;
  container.replaceChildren(...plots().map(drawPlot));
  if (isFirst) container.replaceChildren(...plots().map(drawPlot)); // now the width is known
}

async function showPlan() {
  const picture = await call("plan.svg");
  document.getElementById("plan-picture").src = URL.createObjectURL(await picture.blob());
  isPlanShown = true;
}

async function refresh(onError) {
  try {
    const since = samples.at(-1)?.time ?? 0;
    const latest = await (await call(`samples?since=${since}`)).json();
    const known = since && latest.samples.length && latest.samples[0].time < since ? [] : samples; // the server was restarted
    samples = [...known, ...latest.samples].slice(-2 * SPANS_S.at(-1));
    if (samples.length) draw(latest);
    if (latest.has_plan && !isPlanShown) await showPlan();
  } catch (error) {
    onError(error);
  }
}

export function startPlots(onError) {
  if (timer) return;
  refresh(onError);
  timer = setInterval(() => document.visibilityState === "visible" && refresh(onError), PERIOD_MS);
}

export function stopPlots() {
  clearInterval(timer);
  timer = 0;
}
