// The user's settings, stored in this browser. Empty fields are not sent, so the model's defaults apply.

import { apiKey, setApiKey } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens"];
const EMPTY = { system: "", thinking: false, tools: "", temperature: "", top_p: "", top_k: "", max_tokens: "" };
const field = (name) => document.getElementById(`set-${name}`);

let chosen = { ...EMPTY };
try {
  chosen = { ...EMPTY, ...JSON.parse(localStorage.getItem("culet.settings") ?? "{}") };
} catch {
  localStorage.removeItem("culet.settings");
}

// Returns the settings as fields of a request. The system prompt is not included, since it becomes the first message.
export function requestFields() {
  const fields = { chat_template_kwargs: { enable_thinking: chosen.thinking } };
  for (const name of NUMBERS) if (chosen[name] !== "") fields[name === "max_tokens" ? "max_completion_tokens" : name] = Number(chosen[name]);
  if (chosen.tools.trim()) fields.tools = JSON.parse(chosen.tools);
  return fields;
}

export function systemMessages() {
  return chosen.system.trim() ? [{ role: "system", content: chosen.system }] : [];
}

function show() {
  for (const name of ["system", "tools", ...NUMBERS]) field(name).value = chosen[name];
  field("thinking").checked = chosen.thinking;
  field("key").value = apiKey();
}

function complain(message) {
  const line = document.getElementById("settings-error");
  line.textContent = message;
  line.hidden = !message;
}

function save() {
  const tools = field("tools").value;
  if (tools.trim()) {
    try {
      if (!Array.isArray(JSON.parse(tools))) throw new Error("not a list");
    } catch (error) {
      complain(`Tools must be a JSON list: ${error.message}`);
      return false;
    }
  }
  for (const name of NUMBERS) {
    if (!field(name).checkValidity()) {
      complain(`${field(name).parentElement.firstChild.textContent.trim()}: ${field(name).validationMessage}`);
      return false;
    }
  }
  for (const name of ["system", "tools", ...NUMBERS]) chosen[name] = field(name).value;
  chosen.thinking = field("thinking").checked;
  localStorage.setItem("culet.settings", JSON.stringify(chosen));
  setApiKey(field("key").value.trim());
  complain("");
  return true;
}

const dialog = document.getElementById("settings");

export function openSettings(focus = "system") {
  show();
  complain("");
  dialog.showModal();
  field(focus).focus();
}

// Calls `changed` after the settings are saved.
export function watchSettings(changed) {
  document.getElementById("open-settings").addEventListener("click", () => openSettings());
  document.getElementById("settings-reset").addEventListener("click", () => {
    chosen = { ...EMPTY };
    show();
  });
  dialog.querySelector("form").addEventListener("submit", (event) => {
    if (!save()) event.preventDefault();
    else changed();
  });
}
