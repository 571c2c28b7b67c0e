// Calls the server. Adds the API key and reads answers as a stream of chunks.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "culet.key";

// The key is kept until the tab is closed, or in this browser if the user wants that.
export function apiKey() {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

export function isKeyRemembered() {
  return localStorage.getItem(KEY) !== null;
}

export function setApiKey(key, isRemembered) {
  for (const storage of [sessionStorage, localStorage]) storage.removeItem(KEY);
  if (key) (isRemembered ? localStorage : sessionStorage).setItem(KEY, key);
}

export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "Cannot reach the server.");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new ApiError(response.status, body.error?.message ?? `The server answered ${response.status}.`);
  }
  return response;
}

// Yields the parsed `data:` events of a chat completion until [DONE].
export async function* streamChat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    const events = pending.split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      yield chunk;
    }
  }
}
