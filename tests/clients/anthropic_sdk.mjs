// The texts that Anthropic's client gets, whole and as a stream.
import Anthropic from "@anthropic-ai/sdk";

const ai = new Anthropic({ baseURL: process.argv[2], apiKey: "none" });
const messages = [{ role: "user", content: "Tell me a story" }];
const asked = { model: "any", messages, max_tokens: 20, temperature: 0 };
const whole = await ai.messages.create(asked);
let text = "";
const stream = ai.messages.stream(asked).on("text", piece => { text += piece; });
const last = await stream.finalMessage();
console.log(JSON.stringify([whole.content[0].text, text, last.content[0].text]));
