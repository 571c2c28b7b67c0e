// The list of conversations: search, rename, export, import, delete and restore.

import { announce, element, icon, iconButton } from "./parts/dom.js";
import { openMenu } from "./parts/menu.js";
import { toast } from "./parts/toast.js";
import { change, getConversation, listConversations, onChange, removeConversation, restoreConversation, search } from "./store/conversations.js";
import { exportAll, exportConversation, importFile } from "./store/transfer.js";

const SEARCH_MS = 150;
const DAY_MS = 24 * 3600e3;

const area = document.getElementById("conversations");
const field = document.getElementById("search");
const fileField = document.getElementById("import-file");

let openId = null;
let renamed = null; // id of the conversation whose title is being edited
let timer = 0;
let isPressed = false; // A row must stay while it is pressed, or the click is lost.
let acts = { open: () => {} };

export const addressOf = (id) => `#/chat/${id}`;

function dayOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY_MS) return "Yesterday";
  if (time >= midnight - 7 * DAY_MS) return "Last 7 days";
  return new Date(time).toLocaleDateString("en-GB", { month: "long", year: "numeric" });
}

function row(entry, snippet = "") {
  if (entry.id === renamed) return element("li", { className: "row" }, renameField(entry));
  const link = element("a", { href: addressOf(entry.id), title: entry.title }, element("span", {}, entry.title));
  if (snippet) link.append(element("small", {}, snippet));
  if (entry.id === openId) link.setAttribute("aria-current", "page");
  const more = iconButton("more", `Actions for ${entry.title}`, () => showActions(more, entry), { "aria-haspopup": "menu", "aria-expanded": "false" });
  const node = element("li", { className: "row" }, link, more);
  node.dataset.id = entry.id;
  link.addEventListener("keydown", (event) => {
    if (event.key === "F2") rename(entry);
    if (event.key === "Delete") remove(entry);
  });
  return node;
}

function showActions(button, entry) {
  openMenu(button, [
    ["pencil", "Rename", () => rename(entry)],
    ["out", "Export", () => exportConversation(entry.id)],
    ["trash", "Delete", () => remove(entry), "danger"],
  ]);
}

async function rename(entry) {
  renamed = entry.id;
  await draw();
  const input = area.querySelector("input");
  if (!input) renamed = null; // the user has gone on to search for something else
  input?.focus();
  input?.select();
}

function renameField(entry) {
  const input = element("input", { value: entry.title, maxLength: 200, "aria-label": "Title" });
  const close = (isSaved) => {
    if (renamed !== entry.id) return;
    renamed = null;
    if (isSaved && input.value.trim() && input.value.trim() !== entry.title) change(entry.id, { title: input.value.trim() });
    drawSoon(); // the field may be left by a click on another row, which must stay until then
  };
  input.addEventListener("blur", () => close(true));
  input.addEventListener("keydown", async (event) => {
    if (event.key === "Escape") event.stopPropagation();
    if (event.key !== "Enter" && event.key !== "Escape") return;
    close(event.key === "Enter");
    await draw();
    focusRow(entry.id);
  });
  return input;
}

function focusRow(id) {
  area.querySelector(`[data-id="${id}"] a`)?.focus();
}

function remove(entry) {
  removeConversation(entry.id);
  if (entry.id === openId) acts.open(null);
  toast(`“${entry.title}” was deleted.`, [
    "Undo",
    () => {
      restoreConversation(entry.id);
      acts.open(entry.id);
    },
  ]);
}

function drawGroups(entries) {
  const groups = new Map();
  for (const entry of entries) {
    const day = dayOf(entry.updated);
    if (!groups.has(day)) groups.set(day, []);
    groups.get(day).push(row(entry));
  }
  const nodes = [...groups].flatMap(([day, rows]) => [element("h2", {}, day), element("ul", {}, ...rows)]);
  area.replaceChildren(...(nodes.length ? nodes : [element("p", { className: "faint" }, "No conversations yet.")]));
}

async function drawFound(text) {
  const found = await search(text);
  if (field.value.trim() !== text) return; // the user has typed on
  const rows = found.map(({ entry, snippet }) => row(entry, snippet));
  const heading = rows.length ? `${rows.length} found` : "Nothing found";
  announce(heading);
  area.replaceChildren(element("h2", {}, heading), element("ul", {}, ...rows));
}

async function draw() {
  const text = field.value.trim();
  if (text) await drawFound(text);
  else drawGroups(listConversations());
}

// Draws soon, but not while a title is being edited or a row is pressed. Answers change their conversation often.
function drawSoon() {
  clearTimeout(timer);
  timer = setTimeout(async () => {
    if (renamed || isPressed) return;
    const focused = document.activeElement?.closest?.("#conversations [data-id]")?.dataset.id;
    await draw();
    if (focused) focusRow(focused);
  }, SEARCH_MS);
}

export function markOpen(id) {
  openId = id;
  draw();
}

export function focusSearch() {
  field.focus();
  field.select();
}

async function importChosen() {
  const [file] = fileField.files;
  fileField.value = "";
  if (!file) return;
  try {
    const count = await importFile(file);
    toast(`Imported ${count} conversation${count === 1 ? "" : "s"}.`);
  } catch (error) {
    toast(`Cannot import ${file.name}: ${error.message}.`);
  }
}

// `acts.open` is called with the id of a conversation to show, or null for a new one.
export function watchSidebar(given) {
  acts = given;
  onChange(({ conversation }) => conversation && drawSoon());
  field.addEventListener("input", drawSoon);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !field.value) return;
    event.stopPropagation();
    field.value = "";
    draw();
  });
  fileField.addEventListener("change", importChosen);
  area.addEventListener("pointerdown", () => (isPressed = true));
  for (const kind of ["pointerup", "pointercancel"]) {
    addEventListener(kind, () => {
      if (isPressed) drawSoon();
      isPressed = false;
    });
  }
  const more = document.getElementById("list-actions");
  more.append(icon("more"));
  more.addEventListener("click", () =>
    openMenu(more, [
      ["into", "Import conversations", () => fileField.click()],
      ["out", "Export all conversations", exportAll],
    ]),
  );
  draw();
}

export function titleOf(id) {
  return getConversation(id)?.title;
}
