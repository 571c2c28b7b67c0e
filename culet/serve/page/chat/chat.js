// Shows a conversation and acts on it: sends, edits, regenerates, continues, and goes from branch to branch.

import { sentMedia } from "../media/parts.js";
import { announce, arrange, element, icon } from "../parts/dom.js";
import { toast } from "../parts/toast.js";
import { openSettings } from "../settings.js";
import { change, createConversation, getConversation, messagesOf, newId, onChange, putMessage, restoreConversation } from "../store/conversations.js";
import { childrenByParent, newestEnd, newestOf, pathTo, siblings } from "../store/tree.js";
import { answer, isWriting, latest, stopAnswer } from "./answer.js";
import { focusComposer, say, setPrompt, showDraft, showWriting, watchComposer } from "./composer.js";
import { AnswerItem, UserItem } from "./message.js";

const NEAR_END_PX = 80;
const ANNOUNCE_MS = 500; // after the end of an answer, when it is shown with its format
const SILENCE_MS = 4500; // then an answer in another tab may have been interrupted

const view = document.getElementById("view-chat");
const scroller = document.getElementById("scroller");
const list = document.getElementById("messages");
const toEnd = document.getElementById("to-end");

let current = null; // id of the conversation that is shown, or null for a new one
let wanted = null; // id of the conversation that was opened last, which may still be loading
let messages = new Map(); // those of `current`, by id
let head = null; // the last message that is shown
let items = new Map(); // by message id
let frame = 0;
let onOpened = () => {};

const acts = { goTo, sendEdited, regenerate, goOn, giveResult };
const path = () => pathTo(messages, head).map(latest);
const earlierMedia = () => sentMedia(path());

export function currentConversation() {
  return current;
}

// The address of a conversation is in the part after `#`, so a reload and a second tab show the same one.
export async function openConversation(id) {
  const conversation = id && getConversation(id);
  const isKnown = Boolean(conversation) && !conversation.deleted;
  wanted = id;
  const found = isKnown ? await messagesOf(id) : new Map();
  if (wanted !== id) return; // the user has opened another one meanwhile
  current = isKnown ? id : null;
  messages = found;
  head = isKnown ? (found.has(conversation.head) ? conversation.head : newestOf(found)) : null;
  items = new Map();
  list.replaceChildren();
  say("");
  showDraft(current);
  show();
  scroller.scrollTop = scroller.scrollHeight;
  onOpened(current);
}

function show() {
  const shown = path();
  view.classList.toggle("empty", !shown.length);
  const last = shown.at(-1);
  const children = childrenByParent(messages);
  const nodes = [];
  shown.forEach((message, index) => {
    if (message.role === "tool") return;
    let item = items.get(message.id);
    if (!item) items.set(message.id, (item = new (message.role === "user" ? UserItem : AnswerItem)(acts)));
    const after = shown.slice(index + 1);
    const next = after.findIndex(({ role }) => role !== "tool");
    const results = next < 0 ? after : after.slice(0, next);
    nodes.push(item.node);
    const context = { message, branches: siblings(children, message), isWriting: isWriting(message), results, isLast: next < 0 };
    const key = [message, context.branches.length, context.isWriting, results.length, context.isLast];
    if (!context.isWriting && key.every((value, place) => value === item.key?.[place])) return; // nothing has changed
    item.key = key;
    item.node.dataset.id = message.id;
    item.update(context);
  });
  arrange(list, nodes);
  showWriting(Boolean(last) && isWriting(last));
}

function isAtEnd() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
}

function paint() {
  frame = 0;
  const wasAtEnd = isAtEnd();
  show();
  if (wasAtEnd) scroller.scrollTop = scroller.scrollHeight;
}

function paintSoon() {
  frame ||= requestAnimationFrame(paint);
}

// Acts

function select(id) {
  head = id;
  change(current, { head });
  paint();
}

function goTo(message) {
  select(newestEnd(messages, message.id));
  items.get(message.id)?.node.querySelector(".branches button:enabled")?.focus();
}

async function answerTo(id, failed = null) {
  const conversation = current;
  say("");
  announce("Answering");
  head = id;
  const finished = answer(conversation, path(), paintSoon, failed);
  head = getConversation(conversation).head;
  show();
  scroller.scrollTop = scroller.scrollHeight;
  const message = await finished;
  if (current === conversation) {
    paint();
    setTimeout(() => announce(message.note || items.get(message.id)?.body.innerText || "Finished"), ANNOUNCE_MS);
  }
  if (message.status === 401) openSettings("key");
}

function addMessage(fields) {
  const message = { id: newId(), conversation: current, created: Date.now(), ...fields };
  if (getConversation(current).deleted) restoreConversation(current); // who writes to a conversation wants to keep it
  putMessage(message);
  return message.id;
}

function send(text, media) {
  const last = path().at(-1);
  if (last && isWriting(last)) return false;
  const message = { role: "user", content: text, ...(media.length ? { media } : {}) };
  if (current === null) {
    ({ id: current, messages } = createConversation(text || media[0].name));
    wanted = current;
    onOpened(current);
    answerTo(addMessage({ ...message, parent: null }));
    showDraft(current);
  } else answerTo(addMessage({ ...message, parent: head }));
  return true;
}

function sendEdited(message, text, media) {
  answerTo(addMessage({ role: "user", content: text, ...(media.length ? { media } : {}), parent: message.parent }));
}

function regenerate(message) {
  if (isWriting(message)) return;
  const isEmpty = !message.content && !message.tool_calls && !message.reasoning_content;
  answerTo(message.parent, isEmpty ? message : null);
}

function goOn(message) {
  answerTo(message.id);
}

// The model continues once every call has a result.
function giveResult(message, call, content) {
  head = addMessage({ role: "tool", tool_call_id: call.id, content, parent: head });
  const given = path().map(({ tool_call_id }) => tool_call_id);
  if (message.tool_calls.every(({ id }) => given.includes(id))) answerTo(head);
  else select(head);
}

export function regenerateLast() {
  const last = path().at(-1);
  if (last?.role === "assistant") regenerate(last);
}

export function editLast() {
  const last = path().findLast(({ role }) => role === "user");
  if (last) items.get(last.id).edit();
}

// Returns whether an answer was stopped.
export function stop() {
  const last = path().at(-1);
  if (!last || !isWriting(last)) return false;
  stopAnswer(last);
  return true;
}

export function showExamples(examples) {
  const cards = examples.map(({ title, prompt }) => {
    const card = element("button", { type: "button" }, element("b", {}, title), element("span", {}, prompt));
    card.addEventListener("click", () => setPrompt(prompt));
    return element("li", {}, card);
  });
  document.getElementById("examples").replaceChildren(...cards);
}

// Follows what other tabs do to the conversation that is shown.
function follow({ conversation, message, isRemote }) {
  if (message && message.conversation === current) {
    messages.set(message.id, message);
    if (isRemote && message.parent === head && message.id !== head) head = message.id;
    paintSoon();
    if (isRemote && message.state === "writing") setTimeout(paintSoon, SILENCE_MS);
  }
  if (isRemote && conversation?.id === current && conversation.deleted) {
    toast("This conversation was deleted in another tab.", ["Restore", () => restoreConversation(conversation.id)]);
  }
}

// `opened` is called with the id of the conversation that is shown.
export function watchChat(opened) {
  onOpened = opened;
  onChange(follow);
  watchComposer({ send, stop, earlierMedia });
  toEnd.append(icon("down"));
  toEnd.addEventListener("click", () => scroller.scrollTo({ top: scroller.scrollHeight, behavior: "smooth" }));
  scroller.addEventListener("scroll", () => (toEnd.hidden = isAtEnd()), { passive: true });
  // Blocks appear after the server has rendered them. The end stays in view.
  let wasAtEnd = true;
  scroller.addEventListener("scroll", () => (wasAtEnd = isAtEnd()), { passive: true });
  new ResizeObserver(() => wasAtEnd && (scroller.scrollTop = scroller.scrollHeight)).observe(list);
}

export { focusComposer, say };
