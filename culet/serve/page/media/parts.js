// Turns media into parts of a message, as OpenAI's chat API has them.

export function dataUrlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("A file of this conversation cannot be read."));
    reader.readAsDataURL(blob);
  });
}

async function partOf({ kind, type, blob }) {
  const url = await dataUrlOf(blob);
  if (kind === "audio") return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: type.split("/")[1] } };
  return kind === "image" ? { type: "image_url", image_url: { url } } : { type: "video_url", video_url: { url } };
}

// Returns the media of messages that are sent to the server. Those that the browser could not keep are left out, and the page
// says so where they stood.
export function sentMedia(messages) {
  return messages.flatMap(({ media }) => media ?? []).filter(({ blob }) => blob);
}

// Returns the content of a message. Media come before the text that asks about them.
export async function contentOf(message) {
  const text = message.content;
  const parts = await Promise.all(sentMedia([message]).map(partOf));
  if (!parts.length) return text;
  return text ? [...parts, { type: "text", text }] : parts;
}
