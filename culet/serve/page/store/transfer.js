// Writes conversations to a JSON file and reads them back.

import { element } from "../parts/dom.js";
import { addConversations, getConversation, listConversations, messagesOf } from "./conversations.js";

const FORMAT = "culet-conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "tool"];

async function pack(ids) {
  const conversations = [];
  for (const id of ids) {
    const { deleted, ...conversation } = getConversation(id);
    conversations.push({ ...conversation, messages: [...(await messagesOf(id)).values()] });
  }
  return { format: FORMAT, version: VERSION, exported: new Date().toISOString(), conversations };
}

function fileName(title) {
  return `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60).toLowerCase() || "conversation"}.json`;
}

async function save(ids, name) {
  const content = new Blob([JSON.stringify(await pack(ids), null, 1)], { type: "application/json" });
  const address = URL.createObjectURL(content);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

export function exportConversation(id) {
  return save([id], fileName(getConversation(id).title));
}

export function exportAll() {
  return save(listConversations().map(({ id }) => id), `culet-${new Date().toISOString().slice(0, 10)}.json`);
}

const isText = (value) => typeof value === "string";
const isId = (value) => isText(value) && /^[\w-]{1,64}$/.test(value);
const isTime = (value) => Number.isFinite(value);

function checkMessage(message, conversation) {
  if (!isId(message?.id) || !ROLES.includes(message.role) || !isText(message.content ?? "") || !isTime(message.created)) return false;
  if (message.conversation !== conversation || !(message.parent === null || isId(message.parent))) return false;
  const calls = message.tool_calls ?? [];
  return Array.isArray(calls) && calls.every((call) => isText(call?.id) && isText(call.function?.name) && isText(call.function?.arguments));
}

function check(content) {
  if (content?.format !== FORMAT || content.version !== VERSION || !Array.isArray(content.conversations)) {
    throw new Error("this is not a file of conversations that Culet exported");
  }
  for (const entry of content.conversations) {
    const isGood = isId(entry?.id) && isText(entry.title) && isTime(entry.created) && isTime(entry.updated) && Array.isArray(entry.messages);
    if (!isGood || !entry.messages.every((message) => checkMessage(message, entry.id))) {
      throw new Error(`the conversation ${JSON.stringify(entry?.title ?? "?")} is damaged`);
    }
  }
  return content.conversations;
}

// Returns how many conversations the file has. Raises an error that says what is wrong with it.
export async function importFile(file) {
  let content;
  try {
    content = JSON.parse(await file.text());
  } catch {
    throw new Error("this file is not JSON");
  }
  const entries = check(content);
  await addConversations(entries);
  return entries.length;
}
