// The conversations as the page sees them: in memory, in the database, and the same in every tab.

import { changeConversation, eraseConversation, hasMessage, openDatabase, readConversations, readMessages, scanMessages, writeLonger, writeMessages } from "./database.js";

const JOURNAL = "culet.unsaved."; // what was not in the database yet when its tab was closed
const KEPT_MS = 24 * 3600e3; // how long a deleted conversation can be restored
const TITLE_CHARS = 60;

const conversations = new Map();
const loaded = new Map(); // {messages, ready} of the conversations that were opened: a Map by id, and a promise of it when it is complete
const unsaved = new Map(); // what the database is writing, by id: {message}, or {conversation, changes}
const listeners = [];
const channel = new BroadcastChannel("culet");

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Calls `listener` with {conversation}, {message} or {stop} after each change, with `isRemote` if another tab made it.
export function onChange(listener) {
  listeners.push(listener);
}

function tell(change, isRemote = false) {
  for (const listener of listeners) listener({ ...change, isRemote });
}

function share(change) {
  channel.postMessage(change);
  tell(change);
}

channel.addEventListener("message", ({ data }) => {
  if (data.conversation) conversations.set(data.conversation.id, data.conversation);
  if (data.message) loaded.get(data.message.conversation)?.messages.set(data.message.id, data.message);
  tell(data, true);
});

// Returns whether conversations survive a reload.
export async function startStore() {
  const isKept = await openDatabase();
  await recover(() => {}); // nothing is shown yet
  for (const conversation of await readConversations()) {
    if (conversation.deleted && Date.now() - conversation.deleted > KEPT_MS) eraseConversation(conversation.id);
    else conversations.set(conversation.id, conversation);
  }
  return isKept;
}

// The database may not finish its writes when a tab is closed. What it has not confirmed is kept in the local storage.

async function save(id, entry, write) {
  unsaved.set(id, entry);
  const result = await write;
  if (unsaved.get(id) === entry) unsaved.delete(id);
  return result;
}

let unfinished = () => [];

// `list` returns the answers that are being written.
export function watchUnfinished(list) {
  unfinished = list;
}

function keepEntry(id, entry) {
  try {
    localStorage.setItem(JOURNAL + id, JSON.stringify(entry));
  } catch {
    // The storage is full. The database has all but the last moment.
  }
}

let isLeft = false; // since then, other pages may have changed what this one knows

// One listener for everything, because the browser ends requests as soon as a listener returns.
addEventListener("pagehide", () => {
  if (isLeft) return;
  isLeft = true;
  for (const [id, { message, ...rest }] of unsaved) keepEntry(id, message ? { message: withoutBlobs(message) } : rest);
  for (const message of unfinished()) keepEntry(message.id, { message });
});

// A browser may keep a page that was left and show it again. It starts anew, since it has missed what other tabs said.
addEventListener("pageshow", ({ persisted }) => persisted && location.reload());

async function recover(report) {
  for (const name of Object.keys(localStorage).filter((name) => name.startsWith(JOURNAL))) {
    const entry = JSON.parse(localStorage.getItem(name) ?? "{}"); // another tab may have recovered it
    localStorage.removeItem(name); // before the write, so that no tab writes it once more over something newer
    const { message, conversation, changes } = entry;
    if (conversation) {
      await save(conversation, entry, changeConversation(conversation, changes));
      conversations.set(conversation, { ...conversations.get(conversation), ...changes });
      report({ conversation: conversations.get(conversation) }, true);
    }
    // The database may have written the message after all, and a message of the user with its media.
    if (message && (await save(message.id, entry, writeLonger(message)))) {
      loaded.get(message.conversation)?.messages.set(message.id, message);
      report({ message }, true);
    }
  }
}

// A tab may be closed, or its old page may end, while this page is already open.
addEventListener("storage", ({ key, newValue }) => key?.startsWith(JOURNAL) && newValue && recover(tell));

export function listConversations() {
  return [...conversations.values()].filter((entry) => !entry.deleted).sort((a, b) => b.updated - a.updated);
}

export function getConversation(id) {
  return conversations.get(id);
}

// What another tab says about a message while this tab reads the database is newer than what it reads.
async function load(id, messages) {
  for (const message of await readMessages(id)) if (!messages.has(message.id)) messages.set(message.id, message);
  return messages;
}

export function messagesOf(id) {
  if (!loaded.has(id)) {
    const messages = new Map();
    loaded.set(id, { messages, ready: load(id, messages) });
  }
  return loaded.get(id).ready;
}

// Returns the id of a new conversation and the map for its messages.
export function createConversation(text) {
  const now = Date.now();
  const conversation = { id: newId(), title: titleOf(text), created: now, updated: now, head: null };
  const messages = new Map();
  loaded.set(conversation.id, { messages, ready: Promise.resolve(messages) });
  change(conversation.id, conversation);
  return { id: conversation.id, messages };
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1).trimEnd()}…` : line;
}

export function change(id, changes) {
  if (isLeft) return;
  const conversation = { ...conversations.get(id), ...changes, id };
  conversations.set(id, conversation);
  const entry = { conversation: id, changes: { ...unsaved.get(id)?.changes, ...changes } };
  save(id, entry, changeConversation(id, changes)).catch(reportFull);
  share({ conversation });
}

export function putMessage(message) {
  if (isLeft) return;
  loaded.get(message.conversation)?.messages.set(message.id, message);
  save(message.id, { message }, writeMessages([message])).catch((error) => (message.media?.length ? keepWithoutMedia(message, error) : reportFull(error)));
  share({ message });
}

// Keeps at least the text and the names of the media if the storage is full. This tab still has the media.
async function keepWithoutMedia(message, error) {
  console.warn(error);
  await writeMessages([withoutBlobs(message)]).catch(console.warn);
  onFull(message.media.map(({ name }) => name));
}

function withoutBlobs(message) {
  return message.media ? { ...message, media: message.media.map(({ blob, ...facts }) => facts) } : message;
}

// Adds conversations of a file. Messages that are already here, in any conversation, stay as they are.
export async function addConversations(entries) {
  for (const { messages, ...conversation } of entries) {
    const known = conversations.get(conversation.id);
    const present = await messagesOf(conversation.id);
    const added = [];
    for (const message of messages) if (!present.has(message.id) && !(await hasMessage(message.id))) added.push(message);
    for (const message of added) present.set(message.id, message);
    await writeMessages(added);
    change(conversation.id, known ? { deleted: 0 } : conversation);
    for (const message of added) share({ message });
  }
}

export function removeConversation(id) {
  change(id, { deleted: Date.now() });
}

export function restoreConversation(id) {
  change(id, { deleted: 0 });
}

// Asks the tab that receives an answer to stop it.
export function stopElsewhere(messageId) {
  channel.postMessage({ stop: messageId });
}

// Returns the conversations with `text` in their title or messages, each with the place where it was found.
export async function search(text) {
  const wanted = text.toLowerCase();
  const found = new Map();
  for (const entry of listConversations()) if (entry.title.toLowerCase().includes(wanted)) found.set(entry.id, "");
  await scanMessages((message) => {
    if (found.has(message.conversation) || typeof message.content !== "string") return;
    const at = message.content.toLowerCase().indexOf(wanted);
    if (at >= 0) found.set(message.conversation, message.content.slice(Math.max(0, at - 20), at + 60));
  });
  return listConversations().filter(({ id }) => found.has(id)).map((entry) => ({ entry, snippet: found.get(entry.id) }));
}

let onFull = () => {};

// Calls `act` if something cannot be kept, with the names of media that are lost when this tab is closed.
export function onStorageFull(act) {
  onFull = act;
}

export function reportFull(error) {
  console.warn(error);
  onFull([]);
}
