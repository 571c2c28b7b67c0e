// Records from the microphone, as a WAV file of 16 kHz, mono, which the server reads without a codec.

const SAMPLE_RATE = 16_000;
const HEADER_BYTES = 44;
const MAX_SAMPLE = 0x7fff;

// Browsers offer the microphone only to pages from this machine or over HTTPS.
export function canRecord() {
  return Boolean(navigator.mediaDevices?.getUserMedia && globalThis.MediaRecorder);
}

function toMono(sound) {
  const samples = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) {
    sound.getChannelData(channel).forEach((value, index) => (samples[index] += value / sound.numberOfChannels));
  }
  return samples;
}

// Returns samples from -1 to 1 as the bytes of a WAV file with 16 bits per sample.
export function toWav(samples) {
  const view = new DataView(new ArrayBuffer(HEADER_BYTES + 2 * samples.length));
  const write = (at, text) => [...text].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // whole numbers
  view.setUint16(22, 1, true); // one channel
  view.setUint32(24, SAMPLE_RATE, true);
  view.setUint32(28, 2 * SAMPLE_RATE, true); // bytes per second
  view.setUint16(32, 2, true); // bytes per sample
  view.setUint16(34, 16, true); // bits per sample
  write(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, index) => view.setInt16(HEADER_BYTES + 2 * index, Math.round(Math.max(-1, Math.min(1, value)) * MAX_SAMPLE), true));
  return view.buffer;
}

// Resamples what the browser recorded, in whatever format.
async function convert(pieces, maxSeconds) {
  const recorded = await new Blob(pieces).arrayBuffer();
  const sound = await new OfflineAudioContext(1, 1, SAMPLE_RATE).decodeAudioData(recorded);
  const samples = toMono(sound).subarray(0, Math.floor(maxSeconds * SAMPLE_RATE));
  return new File([toWav(samples)], "recording.wav", { type: "audio/wav" });
}

// Asks for the microphone and records. Returns {finish, discard, file}, where `file` is a promise of the recording, or of null
// if it was discarded. It ends by itself after `maxSeconds`.
export async function record(maxSeconds) {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const pieces = [];
  let isDiscarded = false;
  recorder.addEventListener("dataavailable", ({ data }) => pieces.push(data));
  const stopped = new Promise((resolve) => recorder.addEventListener("stop", resolve)); // also if the microphone is unplugged
  recorder.start();
  const finish = () => recorder.state !== "inactive" && recorder.stop();
  const timer = setTimeout(finish, maxSeconds * 1000);
  const file = stopped.then(() => {
    clearTimeout(timer);
    for (const track of stream.getTracks()) track.stop();
    return isDiscarded ? null : convert(pieces, maxSeconds);
  });
  const discard = () => {
    isDiscarded = true;
    finish();
  };
  return { finish, discard, file };
}
