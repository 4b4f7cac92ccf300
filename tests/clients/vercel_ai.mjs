// The texts that Vercel's AI SDK gets from a provider of OpenAI's form.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, streamText } from "ai";

const qsf = createOpenAICompatible({ name: "qsf", baseURL: process.argv[2] + "/v1", includeUsage: true });
const asked = { model: qsf("any"), prompt: "Tell me a story", maxOutputTokens: 20, temperature: 0 };
const whole = await generateText(asked);
let text = "";
for await (const piece of streamText(asked).textStream) text += piece;
const { embedding } = await embed({ model: qsf.textEmbeddingModel("any"), value: "a" });
if (whole.usage.outputTokens !== 20 || embedding.length < 2) throw new Error("usage, or a vector");
console.log(JSON.stringify([whole.text, text]));
