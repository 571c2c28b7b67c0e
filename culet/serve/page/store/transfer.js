// Writes conversations to a JSON file and reads them back.

import { KINDS } from "../media/accepted.js";
import { asAudio, typeOf } from "../media/formats.js";
import { dataUrlOf } from "../media/parts.js";
import { element } from "../parts/dom.js";
import { addConversations, getConversation, listConversations, messagesOf } from "./conversations.js";

const FORMAT = "culet-conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "tool"];

async function packMessage(message) {
  if (!message.media) return message;
  const media = message.media.map(async ({ blob, ...facts }) => (blob ? { ...facts, data: await dataUrlOf(blob) } : facts));
  return { ...message, media: await Promise.all(media) };
}

// Returns the file in pieces, because conversations with media may be longer than the longest text of a browser.
async function pack(ids) {
  const head = JSON.stringify({ format: FORMAT, version: VERSION, exported: new Date().toISOString() });
  const pieces = [`${head.slice(0, -1)}, "conversations": [`];
  for (const id of ids) {
    const { deleted, ...conversation } = getConversation(id);
    const messages = await Promise.all([...(await messagesOf(id)).values()].map(packMessage));
    pieces.push(pieces.length > 1 ? ",\n" : "", JSON.stringify({ ...conversation, messages }, null, 1));
  }
  return [...pieces, "]}"];
}

function fileName(title) {
  return `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60).toLowerCase() || "conversation"}.json`;
}

async function save(ids, name) {
  const content = new Blob(await pack(ids), { type: "application/json" });
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

function checkMedium(medium) {
  const hasSizes = ["width", "height", "seconds"].every((name) => Number.isFinite(medium?.[name] ?? 0));
  return isText(medium?.name) && KINDS.includes(medium.kind) && hasSizes && isText(medium.data ?? "");
}

// Returns a medium with its bytes, whose type they say themselves.
function unpackMedium({ data, ...facts }) {
  if (data === undefined) return facts;
  const bytes = Uint8Array.from(atob(data.slice(data.indexOf(",") + 1)), (letter) => letter.charCodeAt(0));
  const found = typeOf(bytes) ?? "";
  const type = facts.kind === "audio" ? asAudio(found) : found;
  if (!type.startsWith(`${facts.kind}/`)) throw new Error(`${facts.name} is damaged`);
  return { ...facts, type, blob: new Blob([bytes], { type }) };
}

function unpackMessage(message) {
  return message.media ? { ...message, media: message.media.map(unpackMedium) } : message;
}

function checkMessage(message, conversation) {
  if (!isId(message?.id) || !ROLES.includes(message.role) || !isText(message.content ?? "") || !isTime(message.created)) return false;
  if (message.conversation !== conversation || !(message.parent === null || isId(message.parent))) return false;
  if (!Array.isArray(message.media ?? []) || !(message.media ?? []).every(checkMedium)) return false;
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
  const entries = check(content).map((entry) => ({ ...entry, messages: entry.messages.map(unpackMessage) }));
  await addConversations(entries);
  return entries.length;
}
