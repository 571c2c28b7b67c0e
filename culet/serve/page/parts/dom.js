// Creates elements, and icons drawn with lines.

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 0 14a7 7 0 0 0 0-14M16 16l4.5 4.5",
  pencil: "M4 20l1-4L16.5 4.5a2.1 2.1 0 0 1 3 3L8 19zM14.5 6.5l3 3",
  copy: "M10.5 8.5h7a2 2 0 0 1 2 2v8a2 2 0 0 1-2 2h-7a2 2 0 0 1-2-2v-8a2 2 0 0 1 2-2zM15.5 8.5v-3a2 2 0 0 0-2-2h-7a2 2 0 0 0-2 2v8a2 2 0 0 0 2 2h2",
  check: "M5 12.5l4.5 4.5L19 7",
  again: "M4 12a8 8 0 0 1 14-5.3L20 9M20 4v5h-5M20 12a8 8 0 0 1-14 5.3L4 15M4 20v-5h5",
  onward: "M5 5l7 7l-7 7M13 5l7 7l-7 7",
  up: "M12 19V5M6 11l6-6l6 6",
  down: "M12 5v14M6 13l6 6l6-6",
  left: "M14.5 6l-6 6l6 6",
  right: "M9.5 6l6 6l-6 6",
  sidebar: "M6 4.5h12a2 2 0 0 1 2 2v11a2 2 0 0 1-2 2H6a2 2 0 0 1-2-2v-11a2 2 0 0 1 2-2zM9.5 4.5v15",
  more: "M6 11.5a.5.5 0 1 0 0 1a.5.5 0 0 0 0-1M12 11.5a.5.5 0 1 0 0 1a.5.5 0 0 0 0-1M18 11.5a.5.5 0 1 0 0 1a.5.5 0 0 0 0-1",
  trash: "M4 7h16M10 11v6M14 11v6M6 7l1 13h10l1-13M9 7V4h6v3",
  out: "M12 4v11M7 10.5l5 5l5-5M4 20h16",
  into: "M12 15V4M7 8.5l5-5l5 5M4 20h16",
  info: "M12 4a8 8 0 1 0 0 16a8 8 0 0 0 0-16M12 11v5M12 8h.01",
  chart: "M4 4v16h16M8 15l4-5l3 3l5-7",
  sliders: "M4 7h8M18 7h2M4 17h2M12 17h8M15 4.5a2.5 2.5 0 1 0 0 5a2.5 2.5 0 0 0 0-5M9 14.5a2.5 2.5 0 1 0 0 5a2.5 2.5 0 0 0 0-5",
  contrast: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  bulb: "M9 18h6M10 21h4M9 15a6 6 0 1 1 6 0v3H9z",
  clip: "M19.5 11.5l-7.8 7.8a4.9 4.9 0 0 1-7-7l8.3-8.2a3.3 3.3 0 0 1 4.7 4.6l-8.3 8.2a1.6 1.6 0 0 1-2.3-2.3l7.4-7.4",
  microphone: "M12 3.5a3 3 0 0 0-3 3v5a3 3 0 0 0 6 0v-5a3 3 0 0 0-3-3M6 11.5a6 6 0 0 0 12 0M12 17.5v3",
  close: "M6 6l12 12M18 6L6 18",
};

export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node && key !== "list" && key !== "form") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function shape(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

export function icon(name) {
  const picture = shape("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" });
  picture.append(shape("path", { d: ICONS[name] }));
  return picture;
}

export function iconButton(name, label, act, properties = {}) {
  const button = element("button", { type: "button", className: "quiet", title: label, "aria-label": label, ...properties }, icon(name));
  button.addEventListener("click", act);
  return button;
}

// Puts `nodes` into `parent` in this order. Nodes that are already in place are not touched, so they keep focus and selection.
export function arrange(parent, nodes) {
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  while (parent.children.length > nodes.length) parent.lastElementChild.remove();
}

// Copies a text. Browsers offer their clipboard only to pages from this machine or over HTTPS, so there is a second way.
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { value: text, className: "unseen" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function copyButton(label, textOf) {
  const button = iconButton("copy", label, async () => {
    await copyText(textOf());
    button.replaceChildren(icon("check"));
    announce("Copied");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

// Has a screen reader say a text.
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
