// The field for the next message. What is typed or attached is kept for each conversation until it is sent.

import { draft, keepDraft } from "../store/drafts.js";
import { attachedMedia, clearTray, isTrayBusy, showTray, watchTray } from "../media/tray.js";
import { isThinking, setThinking } from "../settings.js";

const form = document.getElementById("composer");
const field = document.getElementById("prompt");
const sendButton = document.getElementById("send");
const stopButton = document.getElementById("stop");
const thinkButton = document.getElementById("think");
const notice = document.getElementById("notice");

let name = "new"; // of the draft: the conversation's id

function grow() {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
  sendButton.disabled = isTrayBusy() || !(field.value.trim() || attachedMedia().length);
}

export function showDraft(conversation) {
  name = conversation ?? "new";
  field.value = draft(name);
  showTray(name);
  grow();
}

export function focusComposer() {
  field.focus();
}

export function setPrompt(text) {
  field.value = text;
  keepDraft(name, text);
  grow();
  field.focus();
}

export function showWriting(isWriting) {
  if (sendButton.hidden === isWriting) return;
  const hadFocus = [sendButton, stopButton].includes(document.activeElement);
  sendButton.hidden = isWriting;
  stopButton.hidden = !isWriting;
  if (hadFocus) field.focus();
}

export function say(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

export function showThinking() {
  thinkButton.setAttribute("aria-pressed", String(isThinking()));
}

// `send` is called with the text and the media and returns whether they were taken. `earlierMedia` returns those of the
// conversation.
export function watchComposer({ send, stop, earlierMedia }) {
  watchTray({ say, changed: grow, earlierMedia });
  field.addEventListener("input", () => {
    keepDraft(name, field.value);
    grow();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    const draftName = name;
    if (sendButton.disabled || !send(text, attachedMedia())) return;
    keepDraft(draftName, "");
    clearTray(draftName);
    field.value = "";
    grow();
  });
  stopButton.addEventListener("click", stop);
  thinkButton.addEventListener("click", () => {
    setThinking(!isThinking());
    showThinking();
  });
  showThinking();
}
