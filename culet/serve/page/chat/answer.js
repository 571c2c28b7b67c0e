// Receives answers and keeps them as they are written. An answer goes on when the page shows another conversation.

import { streamChat } from "../api.js";
import { contentOf, sentMedia } from "../media/parts.js";
import { budgetFields } from "../media/tokens.js";
import { requestFields, systemMessages } from "../settings.js";
import { change, newId, onChange, putMessage, stopElsewhere, watchUnfinished } from "../store/conversations.js";

const SAVE_MS = 500; // an answer is saved this often, which also tells other tabs that it goes on
const SILENT_MS = 4000; // an answer that another tab writes counts as interrupted after this time without news

const running = new Map(); // AbortController by message id
const heard = new Map(); // when another tab last said something about its answer
let model = "";

export function setModel(name) {
  model = name;
}

export function isWriting(message) {
  if (running.has(message.id)) return true;
  return message.state === "writing" && Date.now() - (heard.get(message.id) ?? 0) < SILENT_MS;
}

// Returns a message with all that has arrived of it.
export function latest(message) {
  return running.get(message.id)?.message ?? message;
}

export function stopAnswer(message) {
  if (running.has(message.id)) running.get(message.id).abort();
  else stopElsewhere(message.id);
}

onChange(({ message, stop, isRemote }) => {
  if (!isRemote) return;
  if (stop) running.get(stop)?.abort();
  if (message?.state === "writing") heard.set(message.id, Date.now());
});

watchUnfinished(() => [...running.values()].map(({ message }) => message));

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

async function forServer(entry) {
  const { role, tool_calls, tool_call_id, reasoning_content } = entry;
  const message = { role, content: await contentOf(entry) };
  if (tool_calls) Object.assign(message, { tool_calls });
  // Thoughts are only needed in a turn that continues after a tool result. The template drops earlier ones anyway.
  if (tool_calls && reasoning_content) Object.assign(message, { reasoning_content });
  if (tool_call_id) Object.assign(message, { tool_call_id });
  return message;
}

function statistics(usage, reason, started, first) {
  const facts = { model, first_ms: first ? Math.round(first - started) : null, finish: reason };
  if (!usage) return facts;
  const seconds = (performance.now() - first) / 1000;
  facts.tokens = usage.completion_tokens;
  facts.prompt_tokens = usage.prompt_tokens;
  facts.cached_tokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  if (usage.completion_tokens > 1 && seconds > 0) facts.tokens_per_s = (usage.completion_tokens - 1) / seconds;
  return facts;
}

async function requestBody(path) {
  const earlier = path.filter((entry) => entry.role !== "assistant" || entry.content || entry.tool_calls);
  const messages = [...systemMessages(), ...(await Promise.all(earlier.map(forServer)))];
  const body = { ...requestFields(), ...budgetFields(sentMedia(path)), model, messages };
  if (path.at(-1).role === "assistant") Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

function newMessage(conversation, parent) {
  return { id: newId(), conversation, parent, role: "assistant", content: "", created: Date.now() };
}

// Adds an answer to the last message of `path`, or continues it if it is an answer. `changed` is called as it grows.
// `failed` is an earlier answer without content, whose place this one takes.
export async function answer(conversation, path, changed, failed = null) {
  const last = path.at(-1);
  const message = { ...(last.role === "assistant" ? last : (failed ?? newMessage(conversation, last.id))), state: "writing", note: "" };
  const controller = Object.assign(new AbortController(), { message });
  running.set(message.id, controller);
  putMessage(message);
  change(conversation, { head: message.id, updated: Date.now() });
  const started = performance.now();
  let [first, usage, reason, saved] = [0, null, null, started];
  const save = () => {
    if (performance.now() - saved < SAVE_MS) return;
    saved = performance.now();
    putMessage({ ...message });
  };
  const saving = setInterval(save, SAVE_MS); // browsers hardly run timers of hidden tabs, so each chunk saves too
  try {
    for await (const chunk of streamChat(await requestBody(path), controller.signal)) {
      first ||= performance.now();
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (choice) {
        merge(message, choice.delta ?? {});
        reason = choice.stop_reason ?? choice.finish_reason ?? reason;
      }
      save();
      changed(message);
    }
    message.state = "done";
    message.stats = statistics(usage, reason, started, first);
  } catch (error) {
    message.state = error.name === "AbortError" ? "stopped" : "failed";
    message.note = message.state === "failed" ? error.message : "";
    message.status = error.status;
  } finally {
    clearInterval(saving);
    running.delete(message.id);
    putMessage({ ...message });
    change(conversation, { updated: Date.now() });
  }
  return message;
}
