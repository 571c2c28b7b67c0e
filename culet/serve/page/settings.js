// The user's settings, stored in this browser. Empty fields are not sent, so the model's defaults apply.

import { apiKey, isKeyRemembered, setApiKey } from "./api.js";

// Fields of the dialog and of a request. Numbers are sent under the same name, except one.
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const REQUEST_NAMES = { max_tokens: "max_completion_tokens" };
const TEXTS = ["system", "tools", "stop", "budget", ...NUMBERS];
const STORAGE = "culet.settings";
const MAX_STOPS = 16;
const EMPTY = { thinking: false, ...Object.fromEntries(TEXTS.map((name) => [name, ""])) };

const dialog = document.getElementById("settings");
const field = (name) => document.getElementById(`set-${name}`);

let chosen = read();

function read() {
  try {
    return { ...EMPTY, ...JSON.parse(localStorage.getItem(STORAGE) ?? "{}") };
  } catch {
    return { ...EMPTY };
  }
}

function keep() {
  localStorage.setItem(STORAGE, JSON.stringify(chosen));
}

// Returns the stop texts: one in each line, where \n stands for a line break.
function stops(text) {
  return text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
}

// Returns the settings as fields of a request. The system prompt is not included, since it becomes the first message.
export function requestFields() {
  const fields = { chat_template_kwargs: { enable_thinking: chosen.thinking } };
  for (const name of NUMBERS) if (chosen[name] !== "") fields[REQUEST_NAMES[name] ?? name] = Number(chosen[name]);
  if (chosen.tools.trim()) fields.tools = JSON.parse(chosen.tools);
  if (stops(chosen.stop).length) fields.stop = stops(chosen.stop);
  return fields;
}

export function systemMessages() {
  return chosen.system.trim() ? [{ role: "system", content: chosen.system }] : [];
}

// Returns the most soft tokens of an image that the user wants, or null for the model's default.
export function chosenBudget() {
  return chosen.budget ? Number(chosen.budget) : null;
}

export function isThinking() {
  return chosen.thinking;
}

export function setThinking(thinking) {
  chosen.thinking = thinking;
  keep();
}

function show() {
  for (const name of TEXTS) field(name).value = chosen[name];
  field("thinking").checked = chosen.thinking;
  field("key").value = apiKey();
  field("remember").checked = isKeyRemembered();
}

function complain(message, name) {
  const line = document.getElementById("settings-error");
  line.textContent = message;
  line.hidden = !message;
  if (!name) return;
  field(name).closest("details")?.setAttribute("open", "");
  field(name).focus();
}

// Returns [problem, field], or null.
function findProblem() {
  const tools = field("tools").value;
  if (tools.trim()) {
    try {
      if (!Array.isArray(JSON.parse(tools))) throw new Error("not a list");
    } catch (error) {
      return [`Tools must be a JSON list: ${error.message}`, "tools"];
    }
  }
  if (stops(field("stop").value).length > MAX_STOPS) return [`At most ${MAX_STOPS} stop texts are possible.`, "stop"];
  const wrong = NUMBERS.find((name) => !field(name).checkValidity());
  return wrong ? [`${field(wrong).labels[0].firstChild.textContent.trim()}: ${field(wrong).validationMessage}`, wrong] : null;
}

export function openSettings(focus = "system") {
  show();
  complain("");
  if (!dialog.open) dialog.showModal();
  field(focus).focus();
}

// Calls `changed` after the settings were saved, here or in another tab.
export function watchSettings(changed) {
  document.getElementById("open-settings").addEventListener("click", () => openSettings());
  document.getElementById("settings-close").addEventListener("click", () => dialog.close());
  document.getElementById("settings-reset").addEventListener("click", () => {
    for (const name of TEXTS) field(name).value = EMPTY[name];
    field("thinking").checked = EMPTY.thinking;
  });
  dialog.querySelector("form").addEventListener("submit", (event) => {
    const problem = findProblem();
    if (problem) {
      event.preventDefault();
      complain(...problem);
      return;
    }
    for (const name of TEXTS) chosen[name] = field(name).value;
    chosen.thinking = field("thinking").checked;
    keep();
    setApiKey(field("key").value.trim(), field("remember").checked);
    changed();
  });
  addEventListener("storage", ({ key }) => {
    if (key !== STORAGE) return;
    chosen = read();
    changed();
  });
}
