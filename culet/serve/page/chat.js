// Runs the conversation. Sends messages, streams, stops and regenerates answers, folds thoughts, and shows tool calls.

import { streamChat } from "./api.js";
import { element, render } from "./markdown.js";
import { openSettings, requestFields, systemMessages } from "./settings.js";

const list = document.getElementById("messages");
const welcome = document.getElementById("welcome");
const composer = document.getElementById("composer");
const prompt = document.getElementById("prompt");
const sendButton = document.getElementById("send");
const stopButton = document.getElementById("stop");
const notice = document.getElementById("notice");

let messages = []; // OpenAI messages. An assistant message may have reasoning_content, tool_calls and our own `note`.
let running = null; // AbortController of the current answer
let model = "";

try {
  messages = JSON.parse(localStorage.getItem("culet.chat") ?? "[]");
} catch {
  localStorage.removeItem("culet.chat");
}

export function setModel(name) {
  model = name;
}

function keep() {
  try {
    localStorage.setItem("culet.chat", JSON.stringify(messages));
  } catch {
    // Storage is full. The conversation continues, but a reload loses it.
  }
}

export function say(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

function footButton(text, title, act) {
  const button = element("button", { type: "button", title }, text);
  button.addEventListener("click", act);
  return button;
}

function userItem(message, index) {
  const edit = footButton("Edit", "Edit this message", () => {
    stop();
    prompt.value = message.content;
    messages = messages.slice(0, index);
    show();
    grow();
    prompt.focus();
  });
  return element("li", { className: "user" }, element("div", { className: "body" }, message.content), element("div", { className: "foot" }, edit));
}

function callCard(call, index) {
  let shown = call.function.arguments;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    // The arguments are incomplete or not JSON. Show them unchanged.
  }
  const card = element(
    "div",
    { className: "call" },
    element("div", { className: "name" }, `${call.function.name}()`),
    element("pre", {}, shown),
  );
  const result = messages.find((message) => message.role === "tool" && message.tool_call_id === call.id);
  if (result) card.append(element("pre", { className: "result" }, result.content));
  else if (!running && call.id) card.append(answerField(call, index));
  return card;
}

// Lets the user type a tool's result. The model continues once every call has one.
function answerField(call, index) {
  const input = element("input", { placeholder: "Result", "aria-label": `Result of ${call.function.name}` });
  const form = element("form", { className: "answer" }, input, element("button", {}, "Send result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    messages.push({ role: "tool", tool_call_id: call.id, content: input.value });
    const isWaiting = messages[index].tool_calls.some((other) => !messages.some((message) => message.tool_call_id === other.id));
    if (isWaiting) show();
    else answer();
  });
  return form;
}

function assistantItem(message, index) {
  const item = element("li", { className: "assistant" });
  fillAssistant(item, message, index, running !== null && index === messages.length - 1);
  return item;
}

function fillAssistant(item, message, index, isWriting) {
  const parts = item.parts ?? (item.parts = {});
  if (message.reasoning_content && !parts.thought) {
    parts.thought = element("div", { className: "thought" });
    parts.summary = element("summary");
    item.prepend(element("details", { className: "thinking" }, parts.summary, parts.thought));
  }
  if (parts.thought) {
    parts.thought.textContent = message.reasoning_content;
    parts.summary.textContent = isWriting && !message.content ? "Thinking…" : "Thoughts";
  }
  if (!parts.body) {
    parts.body = element("div", { className: "body md" });
    parts.calls = element("div", { className: "calls" });
    parts.foot = element("div", { className: "foot" });
    item.append(parts.body, parts.calls, parts.foot);
  }
  render(parts.body, message.content ?? "");
  parts.body.classList.toggle("caret", isWriting);
  parts.calls.replaceChildren(...(message.tool_calls ?? []).map((call) => callCard(call, index)));
  if (isWriting) return;
  const foot = [];
  if (message.content) foot.push(footButton("Copy", "Copy the answer", () => navigator.clipboard.writeText(message.content)));
  if (index === messages.length - 1) foot.push(footButton("Regenerate", "Generate another answer (Alt+R)", regenerate));
  if (message.note) foot.push(element("span", { className: message.failed ? "failed" : "" }, message.note));
  parts.foot.replaceChildren(...foot);
}

export function show() {
  const items = messages.map((message, index) => {
    if (message.role === "user") return userItem(message, index);
    return message.role === "assistant" ? assistantItem(message, index) : null;
  });
  list.replaceChildren(...items.filter(Boolean));
  welcome.hidden = messages.length > 0;
  list.scrollTop = list.scrollHeight;
  keep();
}

function merge(message, delta) {
  if (delta.content) message.content += delta.content;
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) message.reasoning_content = (message.reasoning_content ?? "") + thought;
  for (const piece of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.function.name = piece.function.name;
    if (piece.function?.arguments) call.function.arguments += piece.function.arguments;
  }
}

function forServer({ role, content, tool_calls, tool_call_id, reasoning_content }) {
  const message = { role, content };
  if (tool_calls) Object.assign(message, { tool_calls });
  // Thoughts are only needed in a turn that continues after a tool result. The template drops earlier ones anyway.
  if (tool_calls && reasoning_content) Object.assign(message, { reasoning_content });
  if (tool_call_id) Object.assign(message, { tool_call_id });
  return message;
}

function describe(usage, reason, started, first) {
  const parts = [];
  if (first) parts.push(`first token ${Math.round(first - started)} ms`);
  if (usage) {
    const seconds = (performance.now() - first) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    parts.push(`${usage.completion_tokens} tokens`);
  }
  if (reason === "length") parts.push("token limit reached");
  return parts.join(" · ");
}

async function answer() {
  say("");
  const message = { role: "assistant", content: "" };
  const body = { ...requestFields(), model, messages: [...systemMessages(), ...messages.map(forServer)] };
  messages.push(message);
  running = new AbortController();
  sendButton.hidden = true;
  stopButton.hidden = false;
  show();
  const item = list.lastElementChild;
  const index = messages.length - 1;
  const started = performance.now();
  let first = 0;
  let usage = null;
  let reason = null;
  let frame = 0;
  const paint = () => {
    frame = 0;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    fillAssistant(item, message, index, true);
    if (atEnd) list.scrollTop = list.scrollHeight;
  };
  paint();
  const mine = running;
  try {
    for await (const chunk of streamChat(body, mine.signal)) {
      first ||= performance.now();
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (choice) {
        merge(message, choice.delta ?? {});
        reason = choice.finish_reason ?? reason;
      }
      frame ||= requestAnimationFrame(paint);
    }
    message.note = describe(usage, reason, started, first);
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else {
      message.note = error.message;
      message.failed = true;
      if (error.status === 401) {
        messages.pop();
        say("This server requires an API key.");
        openSettings("key");
      }
    }
  } finally {
    cancelAnimationFrame(frame);
    if (running === mine) running = null;
    sendButton.hidden = false;
    stopButton.hidden = true;
    show();
  }
}

export function stop() {
  running?.abort();
}

export function regenerate() {
  if (running) return;
  while (messages.length && messages.at(-1).role !== "user") messages.pop();
  if (messages.length) answer();
}

export function newChat() {
  stop();
  messages = [];
  show();
  say("");
  prompt.focus();
}

export function isRunning() {
  return running !== null;
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

export function watchChat() {
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    composer.requestSubmit();
  });
  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if (!text || running) return;
    messages.push({ role: "user", content: text });
    prompt.value = "";
    grow();
    answer();
  });
  stopButton.addEventListener("click", stop);
  show();
}
