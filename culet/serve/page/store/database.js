// Keeps conversations and messages in the browser's database. Each message is a record of its own, so two tabs that write to
// the same conversation only add records.

const NAME = "culet";
const VERSION = 2; // 2 added the media of unsent messages

let database = null;

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const finished = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });

// Returns whether the browser has a database for this page.
export async function openDatabase() {
  try {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => {
      if (oldVersion < 1) {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
      }
      request.result.createObjectStore("drafts", { keyPath: "id" });
    };
    database = await done(request);
    database.onversionchange = () => database.close();
    return true;
  } catch {
    return false;
  }
}

export async function readConversations() {
  return database ? done(database.transaction("conversations").objectStore("conversations").getAll()) : [];
}

export async function readMessages(conversation) {
  return database ? done(database.transaction("messages").objectStore("messages").index("conversation").getAll(conversation)) : [];
}

export async function hasMessage(id) {
  return database ? (await done(database.transaction("messages").objectStore("messages").count(id))) > 0 : false;
}

// Calls `visit` with every message.
export async function scanMessages(visit) {
  if (!database) return;
  const request = database.transaction("messages").objectStore("messages").openCursor();
  await new Promise((resolve, reject) => {
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      if (!request.result) return resolve();
      visit(request.result.value);
      request.result.continue();
    };
  });
}

export async function writeMessages(messages) {
  if (!database) return;
  const transaction = database.transaction("messages", "readwrite");
  for (const message of messages) transaction.objectStore("messages").put(message);
  await finished(transaction);
}

// Answers only grow, so the longer one is the newer one. Of two that are equally long, one that is being written is the older one.
const sizeOf = ({ content, reasoning_content, tool_calls }) => JSON.stringify([content, reasoning_content, tool_calls]).length;
const isNewer = (message, stored) => sizeOf(message) > sizeOf(stored) || (sizeOf(message) === sizeOf(stored) && stored.state === "writing");

// Writes a message unless the database has the same or more of it. Returns whether it was written.
export async function writeLonger(message) {
  if (!database) return false;
  const transaction = database.transaction("messages", "readwrite");
  const store = transaction.objectStore("messages");
  const request = store.get(message.id);
  let isWritten = false;
  request.onsuccess = () => {
    isWritten = !request.result || isNewer(message, request.result);
    if (isWritten) store.put(message);
  };
  await finished(transaction);
  return isWritten;
}

// Drafts: {id, tab, name, kept, media}

export async function readDrafts() {
  return database ? done(database.transaction("drafts").objectStore("drafts").getAll()) : [];
}

export async function writeDraft(draft) {
  if (!database) return;
  const transaction = database.transaction("drafts", "readwrite");
  transaction.objectStore("drafts").put(draft);
  await finished(transaction);
}

export async function eraseDraft(id) {
  if (!database) return;
  const transaction = database.transaction("drafts", "readwrite");
  transaction.objectStore("drafts").delete(id);
  await finished(transaction);
}

// Changes some fields of a conversation. What other tabs changed meanwhile stays.
export async function changeConversation(id, changes) {
  if (!database) return;
  const transaction = database.transaction("conversations", "readwrite");
  const store = transaction.objectStore("conversations");
  const request = store.get(id);
  request.onsuccess = () => store.put({ ...request.result, ...changes, id });
  await finished(transaction);
}

export async function eraseConversation(id) {
  if (!database) return;
  const transaction = database.transaction(["conversations", "messages"], "readwrite");
  transaction.objectStore("conversations").delete(id);
  const request = transaction.objectStore("messages").index("conversation").openKeyCursor(id);
  request.onsuccess = () => {
    if (!request.result) return;
    transaction.objectStore("messages").delete(request.result.primaryKey);
    request.result.continue();
  };
  await finished(transaction);
}
