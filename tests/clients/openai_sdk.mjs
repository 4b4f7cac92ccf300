// The texts that OpenAI's client gets, of each API.
import OpenAI from "openai";

const ai = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none" });
const content = "Tell me a story";
const asked = { model: "any", messages: [{ role: "user", content }], max_tokens: 20, temperature: 0 };
const whole = await ai.chat.completions.create(asked);
let text = "";
for await (const chunk of await ai.chat.completions.create({ ...asked, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
const own = await ai.responses.create({ model: "any", input: content, max_output_tokens: 20, temperature: 0 });
const { data } = await ai.embeddings.create({ model: "any", input: ["a", "b"] });
if (data.length !== 2) throw new Error(`${data.length} vectors`);
console.log(JSON.stringify([whole.choices[0].message.content, text, own.output_text]));
