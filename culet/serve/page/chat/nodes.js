// Creates elements from the nodes that the server makes of Markdown. Only listed names and attributes become elements, and all
// text becomes text nodes, so nothing that a model writes can become markup or script.

import { copyButton, element } from "../parts/dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const HTML_NAMES = new Set("p h1 h2 h3 h4 h5 h6 strong em del code blockquote ul ol li table thead tbody tr th td hr br span".split(" "));
const MATH_NAMES = new Set(
  ("math mrow mi mo mn ms mtext mspace msup msub msubsup mfrac msqrt mroot mover munder munderover mmultiscripts mprescripts none " +
    "mtable mtr mtd mpadded mphantom menclose mstyle merror").split(" "),
);
const MATH_ATTRIBUTES = new Set(
  ("accent accentunder columnalign columnlines columnspacing depth display displaystyle fence form height largeop linethickness " +
    "lspace mathsize mathvariant maxsize minsize movablelimits notation rowlines rowspacing rspace scriptlevel separator stretchy " +
    "symmetric voffset width").split(" "),
);
const CLASS = /^[a-z0-9]{1,16}$/;
const ADDRESS = /^(https?:\/\/|mailto:)/i;

export function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const [name, attributes, ...children] = node;
  if (MATH_NAMES.has(name)) return buildMath(name, attributes, children);
  const inner = () => children.map(build);
  if (name === "codeblock") return buildCode(attributes.language, children);
  if (name === "table") return element("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": "Table" }, element("table", {}, ...inner()));
  if (name === "input") return element("input", { type: "checkbox", disabled: true, checked: attributes.checked === true, "aria-label": attributes.checked ? "Done" : "To do" });
  if (name === "a" && ADDRESS.test(attributes.href)) return element("a", { href: attributes.href, target: "_blank", rel: "noopener noreferrer" }, ...inner());
  const made = element(HTML_NAMES.has(name) ? name : "span", {}, ...inner());
  if (CLASS.test(attributes.class ?? "")) made.className = attributes.class;
  if (name === "ol" && Number.isInteger(attributes.start)) made.start = attributes.start;
  return made;
}

function buildMath(name, attributes, children) {
  const made = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) if (MATH_ATTRIBUTES.has(key)) made.setAttribute(key, value);
  made.append(...children.map(build));
  if (name !== "math" || attributes.display !== "block") return made;
  return element("div", { className: "formula scroll", tabIndex: 0, role: "group", "aria-label": "Formula" }, made);
}

function buildCode(language, children) {
  const code = element("code", {}, ...children.map(build));
  const label = language ? `Code in ${language}` : "Code";
  return element(
    "div",
    { className: "code" },
    element("div", { className: "bar" }, element("span", {}, language || "text"), copyButton("Copy the code", () => code.textContent.replace(/\n$/, ""))),
    element("pre", { tabIndex: 0, role: "group", "aria-label": label }, code),
  );
}
