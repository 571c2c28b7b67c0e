// Shows tool calls with their results, and lets the user type a missing result.

import { element } from "../parts/dom.js";

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // the arguments are incomplete or not JSON
  }
}

// `giveResult` is called with the call and its result. It is null while the calls cannot be answered.
export function callCard(call, result, giveResult) {
  const card = element(
    "div",
    { className: "call" },
    element("div", { className: "name" }, `${call.function.name}()`),
    element("pre", { tabIndex: 0, role: "group", "aria-label": "Arguments" }, indented(call.function.arguments)),
  );
  if (result) card.append(element("pre", { className: "result", tabIndex: 0, role: "group", "aria-label": "Result" }, result.content));
  else if (giveResult && call.id) card.append(resultField(call, giveResult));
  return card;
}

function resultField(call, giveResult) {
  const input = element("input", { placeholder: "Result", "aria-label": `Result of ${call.function.name}` });
  const form = element("form", { className: "answer" }, input, element("button", {}, "Send result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    giveResult(call, input.value);
  });
  return form;
}
