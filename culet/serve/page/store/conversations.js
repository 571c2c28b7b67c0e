// The conversations as the page sees them: in memory, in the database, and the same in every tab.

import { changeConversation, eraseConversation, openDatabase, readConversations, readMessages, scanMessages, writeMessages } from "./database.js";

const JOURNAL = "culet.unsaved."; // the part of an answer that was not in the database yet when its tab was closed
const KEPT_MS = 24 * 3600e3; // how long a deleted conversation can be restored
const TITLE_CHARS = 60;

const conversations = new Map();
const loaded = new Map(); // {messages, ready} of the conversations that were opened: a Map by id, and a promise of it when it is complete
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
  for (const conversation of await readConversations()) {
    if (conversation.deleted && Date.now() - conversation.deleted > KEPT_MS) eraseConversation(conversation.id);
    else conversations.set(conversation.id, conversation);
  }
  await recover();
  return isKept;
}

async function recover() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(JOURNAL));
  if (!names.length) return;
  await writeMessages(names.map((name) => JSON.parse(localStorage.getItem(name))));
  for (const name of names) localStorage.removeItem(name);
}

// Keeps a message when there is no time for the database any more.
export function saveAtOnce(message) {
  try {
    localStorage.setItem(JOURNAL + message.id, JSON.stringify(message));
  } catch {
    // The storage is full. The database has all but the last moment of the answer.
  }
}

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

export function createConversation(text) {
  const now = Date.now();
  const conversation = { id: newId(), title: titleOf(text), created: now, updated: now, head: null };
  change(conversation.id, conversation);
  return conversation;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1).trimEnd()}…` : line;
}

export function change(id, changes) {
  const conversation = { ...conversations.get(id), ...changes, id };
  conversations.set(id, conversation);
  changeConversation(id, changes).catch(reportFull);
  share({ conversation });
}

export function putMessage(message) {
  loaded.get(message.conversation)?.messages.set(message.id, message);
  writeMessages([message]).catch((error) => (message.media?.length ? keepWithoutMedia(message, error) : reportFull(error)));
  share({ message });
}

// Keeps at least the text and the names of the media if the storage is full. This tab still has the media.
async function keepWithoutMedia(message, error) {
  console.warn(error);
  await writeMessages([{ ...message, media: message.media.map(({ blob, ...facts }) => facts) }]).catch(console.warn);
  onFull(message.media.map(({ name }) => name));
}

// Adds conversations of a file. Messages that are already here stay as they are.
export async function addConversations(entries) {
  for (const { messages, ...conversation } of entries) {
    const known = conversations.get(conversation.id);
    const present = await messagesOf(conversation.id);
    const added = messages.filter((message) => !present.has(message.id));
    for (const message of added) present.set(message.id, message);
    await writeMessages(added);
    change(conversation.id, known ? { deleted: 0 } : conversation);
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
