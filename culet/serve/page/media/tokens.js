// How many soft tokens a medium takes, by the server's own formulas (`culet/media/spec.py`).

import { chosenBudget } from "../settings.js";
import { whatIsAccepted } from "./accepted.js";

const TOKEN_SIDE = 48; // a soft token stands for 48 x 48 pixels
const SAMPLE_RATE = 16_000;
const SAMPLES_PER_TOKEN = 640;
const USUAL_FRAME_RATE = 24;

// The order of the operations is that of the server, because another one rounds differently.
export function imageTokens(width, height, budget) {
  const factor = Math.sqrt((budget * TOKEN_SIDE ** 2) / (height * width));
  const rows = Math.floor((factor * height) / TOKEN_SIDE);
  const columns = Math.floor((factor * width) / TOKEN_SIDE);
  if (rows === 0) return Math.min(Math.floor(width / height), budget);
  if (columns === 0) return Math.min(Math.floor(height / width), budget);
  return rows * columns;
}

export function audioTokens(seconds, features) {
  const samples = Math.ceil(seconds * SAMPLE_RATE - 0.05); // browsers round a duration to microseconds
  if (features === "samples") return Math.ceil(samples / SAMPLES_PER_TOKEN);
  const frames = Math.max(0, Math.floor((samples + 160 - 321) / 160) + 1);
  return Math.floor((frames + 3) / 4);
}

// Returns the budget that the settings ask for, or null for the model's own. It is at most what the server allows for an image,
// and with a video among the media of a request, what it allows for a frame.
function budgetFor(media) {
  const most = (kind) => Math.max(...(whatIsAccepted()?.[kind]?.budgets ?? []), 0) || Infinity;
  const kinds = ["image", "video"].filter((name) => media.some(({ kind }) => kind === name));
  return kinds.length && chosenBudget() ? Math.min(chosenBudget(), ...kinds.map(most)) : null;
}

// Returns the fields that a request with these media has besides its messages.
export function budgetFields(media) {
  const budget = media.length ? budgetFor(media) : null;
  return budget ? { mm_processor_kwargs: { max_soft_tokens: budget } } : {};
}

// Returns {count, isExact}, or null if the size is unknown. `all` are the media of the whole request.
export function softTokens({ kind, type, width, height, seconds }, all) {
  const given = whatIsAccepted()?.[kind];
  if (!given) return null;
  const budget = kind === "audio" ? null : (budgetFor(all) ?? given.budget);
  if (kind === "image") return { count: imageTokens(width, height, budget), isExact: true };
  if (!Number.isFinite(seconds)) return null;
  if (kind === "audio") return { count: audioTokens(seconds, given.features), isExact: type === "audio/wav" };
  if (!width) return null;
  // The browser does not say how many frames a video has. Almost all have more than are taken.
  const numFrames = Math.max(1, Math.min(given.num_frames, Math.round(seconds * USUAL_FRAME_RATE)));
  return { count: numFrames * imageTokens(width, height, budget), isExact: false };
}

export function describeTokens(sizes) {
  const count = sizes.reduce((sum, size) => sum + (size?.count ?? 0), 0);
  const isExact = sizes.every((size) => size?.isExact);
  if (!sizes.some(Boolean)) return "unknown number of soft tokens";
  return `${isExact ? "" : "about "}${count.toLocaleString("en-GB")} soft token${count === 1 ? "" : "s"}`;
}
