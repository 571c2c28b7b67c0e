// The media of the next message: files that are attached, pasted or dropped, and recordings. Each is shown with its size in soft
// tokens and can be removed.

import { announce, icon } from "../parts/dom.js";
import { draftMedia, keepDraftMedia } from "../store/drafts.js";
import { acceptedKinds, acceptedTypes, kindNames, whatIsAccepted } from "./accepted.js";
import { checkTogether, readMedium, Refusal } from "./read.js";
import { canRecord, record } from "./recorder.js";
import { clock, forget, showMedia } from "./show.js";
import { describeTokens, softTokens } from "./tokens.js";

const TICK_MS = 200;
const MICROPHONE_PROBLEMS = { NotAllowedError: "The browser does not allow this page to use the microphone.", NotFoundError: "There is no microphone." };

const byId = (id) => document.getElementById(id);
const view = byId("view-chat");
const attachButton = byId("attach");
const recordButton = byId("record");
const fileField = byId("attach-files");
const list = byId("tray");

let name = "new"; // of the draft: the conversation's id
let numReading = 0; // files that are being read
let recording = null;
let acts = { say: () => {}, changed: () => {}, earlierMedia: () => [] };

export function attachedMedia() {
  return draftMedia(name);
}

// Whether something is still being read or recorded, so that a message would go without it.
export function isTrayBusy() {
  return Boolean(numReading || recording);
}

export function showTray(draftName) {
  name = draftName;
  showSizes();
}

export function clearTray(draftName) {
  keepDraftMedia(draftName, []);
  if (draftName === name) showSizes();
}

function describe(medium, all) {
  const tokens = describeTokens([softTokens(medium, all)]);
  return Number.isFinite(medium.seconds) ? `${clock(medium.seconds)}, ${tokens}` : tokens;
}

// Shows what is attached. Sizes depend on the settings and on the other media of the request.
export function showSizes() {
  const media = attachedMedia();
  const all = [...acts.earlierMedia(), ...media];
  showMedia(list, media, { remove, describe: (medium) => describe(medium, all) });
  byId("tray-size").hidden = media.length < 2;
  byId("tray-size").textContent = `Together ${describeTokens(media.map((medium) => softTokens(medium, all)))}`;
  acts.changed();
}

function remove(medium) {
  const at = attachedMedia().indexOf(medium);
  keepDraftMedia(name, attachedMedia().filter((other) => other !== medium));
  forget(medium);
  showSizes();
  announce(`Removed ${medium.name}`);
  const buttons = list.querySelectorAll(".remove");
  (buttons[Math.min(at, buttons.length - 1)] ?? byId("prompt")).focus();
}

// Adds a file to a draft. Returns what is wrong with it, or "".
async function add(file, target) {
  try {
    const medium = await readMedium(file);
    const earlier = target === name ? acts.earlierMedia() : []; // the user may have gone to another conversation
    checkTogether(medium, [...earlier, ...draftMedia(target)]);
    keepDraftMedia(target, [...draftMedia(target), medium]);
    announce(`Attached ${medium.name}, ${describe(medium, [...earlier, medium])}`);
    return "";
  } catch (error) {
    if (error instanceof Refusal) return error.message;
    throw error;
  }
}

async function attach(files) {
  const target = name;
  const problems = [];
  numReading += 1;
  acts.changed();
  try {
    for (const file of files) problems.push(await add(file, target));
  } finally {
    numReading -= 1;
    showSizes();
    acts.say(problems.filter(Boolean).join(" "));
  }
}

export function chooseFiles() {
  if (!attachButton.hidden) fileField.click();
}

// Recordings

function showRecording(startedAt = 0) {
  const isRecording = Boolean(recording);
  const label = isRecording ? "Finish the recording" : "Record from the microphone";
  byId("recording").hidden = !isRecording;
  if (isRecording) byId("recorded").textContent = `Recording ${clock((performance.now() - startedAt) / 1000)} of ${clock(recording.maxSeconds)}`;
  recordButton.classList.toggle("on", isRecording);
  recordButton.setAttribute("aria-label", label);
  recordButton.title = label;
}

async function startRecording() {
  const maxSeconds = whatIsAccepted().audio.max_s;
  recordButton.disabled = true; // until the user has answered the browser's question
  try {
    recording = { ...(await record(maxSeconds)), maxSeconds };
  } catch (error) {
    acts.say(MICROPHONE_PROBLEMS[error.name] ?? "The microphone cannot be used.");
    return;
  } finally {
    recordButton.disabled = false;
  }
  acts.say("");
  announce("Recording");
  const startedAt = performance.now();
  const timer = setInterval(() => showRecording(startedAt), TICK_MS);
  showRecording(startedAt);
  acts.changed();
  let file = null;
  try {
    file = await recording.file;
  } catch {
    acts.say("Nothing was recorded.");
  }
  clearInterval(timer);
  recording = null;
  showRecording();
  if (file) await attach([file]);
  acts.changed();
  if (performance.now() - startedAt >= 1000 * maxSeconds) acts.say(`The recording ended after ${maxSeconds} s, the most that this model hears at once.`);
}

// Paste and drop

function onPaste(event) {
  const { files, types } = event.clipboardData;
  const isText = types.includes("text/plain") && types.includes("text/html"); // office programs add a picture of the text
  if (!files.length || isText || document.querySelector("dialog[open]") || view.hidden) return;
  event.preventDefault();
  attach([...files]);
}

function showDrop(isOver) {
  byId("drop").hidden = !isOver;
}

// A file that is dropped beside the chat must not replace the page.
function watchDrops() {
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files") && !document.querySelector("dialog[open]");
  addEventListener("dragover", (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    const isOver = hasFiles(event) && view.contains(event.target);
    event.dataTransfer.dropEffect = isOver ? "copy" : "none";
    showDrop(isOver && acceptedKinds().length > 0);
  });
  addEventListener("dragleave", (event) => event.relatedTarget || showDrop(false));
  addEventListener("drop", (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    showDrop(false);
    if (hasFiles(event) && view.contains(event.target)) attach([...event.dataTransfer.files]);
  });
}

// Shows only what the server takes.
export function showAbilities() {
  const kinds = acceptedKinds();
  attachButton.hidden = !kinds.length;
  attachButton.title = `Attach ${kindNames()} (Alt+A)`;
  attachButton.setAttribute("aria-label", `Attach ${kindNames()}`);
  recordButton.hidden = !kinds.includes("audio") || !canRecord();
  fileField.accept = acceptedTypes().join(",");
  byId("drop").textContent = `Drop ${kindNames()} here`;
  byId("budget-field").hidden = !kinds.includes("image");
  const budgets = whatIsAccepted()?.image?.budgets ?? [];
  for (const option of byId("set-budget").options) option.disabled = option.value && !budgets.includes(Number(option.value));
  showSizes();
}

// `say` shows a problem, `changed` is called when the tray has changed, and `earlierMedia` returns those of the conversation.
export function watchTray(given) {
  acts = given;
  attachButton.addEventListener("click", chooseFiles);
  fileField.addEventListener("change", () => {
    attach([...fileField.files]);
    fileField.value = "";
  });
  recordButton.addEventListener("click", () => (recording ? recording.finish() : startRecording()));
  byId("discard").prepend(icon("trash"));
  byId("discard").addEventListener("click", () => recording?.discard());
  addEventListener("paste", onPaste);
  addEventListener("beforeunload", (event) => recording && event.preventDefault());
  watchDrops();
}
