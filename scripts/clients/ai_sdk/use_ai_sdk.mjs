// The AI SDK with its providers. The argument is openai-compatible, openai or anthropic.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

const baseURL = `${process.env.CULET_URL}/v1`;
const makers = {
  "openai-compatible": () => createOpenAICompatible({ name: "culet", baseURL, supportsStructuredOutputs: true }),
  openai: () => createOpenAI({ baseURL, apiKey: "none" }),
  anthropic: () => createAnthropic({ baseURL, apiKey: "none" }),
};
const model = makers[process.argv[2]]()(process.env.CULET_MODEL);
const GREETING = "Hello! How are you?";

const translate = tool({
  description: "Translate a word.",
  inputSchema: z.object({ text: z.string().describe("The text"), language: z.string().describe("The language") }),
});

const checks = {
  async plain() {
    const { text, usage } = await generateText({ model, prompt: GREETING });
    assert.ok(text);
    assert.ok(usage.outputTokens > 0);
  },
  async stream() {
    const parts = [];
    for await (const part of streamText({ model, prompt: GREETING }).textStream) parts.push(part);
    assert.ok(parts.length > 1, JSON.stringify(parts));
  },
  async tools() {
    const { toolCalls } = await generateText({ model, prompt: "Translate house to French.", tools: { translate }, toolChoice: "required" });
    assert.equal(toolCalls.length, 1);
    assert.equal(toolCalls[0].toolName, "translate");
    assert.equal(typeof toolCalls[0].input.text, "string");
  },
  async structured() {
    const schema = z.object({ name: z.string(), age: z.number().int() });
    const prompt = "Make JSON with the name and the age: Anna is 31 years old.";
    const { output } = await generateText({ model, prompt, output: Output.object({ schema }) });
    schema.parse(output);
  },
};

const outcome = {};
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    outcome[name] = "";
  } catch (error) {
    console.error(error);
    outcome[name] = `${error.name}: ${error.message}`.slice(0, 300);
  }
}
console.log(JSON.stringify(outcome));
