// Texts and media that were not sent, for each conversation, and texts of messages that are being edited. They belong to this tab,
// so two tabs do not overwrite each other's, and survive a reload.

import { newId, reportFull } from "./conversations.js";
import { eraseDraft, readDrafts, writeDraft } from "./database.js";

const PREFIX = "culet.draft.";
const TAB = "culet.tab";
const KEPT_MS = 7 * 24 * 3600e3; // then the tab has been closed

const media = new Map(); // by the draft's name
let tab = "";

export function draft(name) {
  return sessionStorage.getItem(PREFIX + name) ?? "";
}

export function keepDraft(name, text) {
  try {
    if (text) sessionStorage.setItem(PREFIX + name, text);
    else sessionStorage.removeItem(PREFIX + name);
  } catch {
    // The storage is full. The text stays in its field.
  }
}

export async function startDrafts() {
  tab = sessionStorage.getItem(TAB) ?? newId();
  sessionStorage.setItem(TAB, tab);
  for (const entry of await readDrafts()) {
    if (entry.tab === tab) media.set(entry.name, entry.media);
    else if (Date.now() - entry.kept > KEPT_MS) eraseDraft(entry.id);
  }
}

export function draftMedia(name) {
  return media.get(name) ?? [];
}

export function keepDraftMedia(name, list) {
  media.set(name, list);
  const id = `${tab}.${name}`;
  if (list.length) writeDraft({ id, tab, name, kept: Date.now(), media: list }).catch(reportFull);
  else eraseDraft(id).catch(reportFull);
}
