// Short notices at the bottom of the page, some with a button.

import { element, icon } from "./dom.js";

const SHOWN_MS = 5000;
const OFFERED_MS = 15_000; // with a button
const MAX_SHOWN = 4;

export function toast(text, action) {
  const area = document.getElementById("toasts");
  const note = element("div", { className: action ? "toast offer" : "toast" }, element("span", {}, text));
  const close = () => note.remove();
  if (action) {
    const [label, act] = action;
    const button = element("button", { type: "button", className: "plain" }, label);
    button.addEventListener("click", () => {
      close();
      act();
    });
    note.append(button);
  }
  const dismiss = element("button", { type: "button", className: "quiet", "aria-label": "Dismiss" }, icon("close"));
  dismiss.addEventListener("click", close);
  note.append(dismiss);
  // Each button stays: who deletes two conversations can restore both.
  for (const other of area.querySelectorAll(".toast:not(.offer)")) other.remove();
  area.append(note);
  if (area.children.length > MAX_SHOWN) area.firstElementChild.remove();
  setTimeout(close, action ? OFFERED_MS : SHOWN_MS);
}
