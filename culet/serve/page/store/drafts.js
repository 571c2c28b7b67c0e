// Texts that were typed and not sent, for each conversation and each message that is being edited. They belong to this tab, so
// two tabs do not overwrite each other's, and survive a reload.

const PREFIX = "culet.draft.";

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
