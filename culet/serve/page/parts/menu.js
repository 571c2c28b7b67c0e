// A menu that opens at a button. Arrow keys move in it, Esc closes it and returns to the button.

import { element, icon } from "./dom.js";

const MARGIN = 8;

// `entries` are [icon, text, function] or [icon, text, function, "danger"].
export function openMenu(button, entries) {
  const menu = element("div", { className: "menu", popover: "auto", role: "menu", "aria-label": button.getAttribute("aria-label") });
  for (const [picture, text, act, kind] of entries) {
    const entry = element("button", { type: "button", role: "menuitem", className: kind ?? "" }, icon(picture), text);
    entry.addEventListener("click", () => {
      menu.hidePopover();
      act();
    });
    menu.append(entry);
  }
  menu.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const items = [...menu.children];
    items[(items.indexOf(document.activeElement) + step + items.length) % items.length].focus();
  });
  menu.addEventListener("toggle", (event) => {
    if (event.newState !== "closed") return;
    button.setAttribute("aria-expanded", "false");
    menu.remove();
  });
  document.body.append(menu);
  menu.showPopover();
  button.setAttribute("aria-expanded", "true");
  const place = button.getBoundingClientRect();
  const below = place.bottom + menu.offsetHeight + MARGIN < innerHeight;
  menu.style.left = `${Math.max(MARGIN, Math.min(place.left, innerWidth - menu.offsetWidth - MARGIN))}px`;
  menu.style.top = `${below ? place.bottom + 4 : place.top - menu.offsetHeight - 4}px`;
  menu.firstElementChild.focus();
}
