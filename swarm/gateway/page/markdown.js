// Markdown as a model writes it, to elements. No text becomes markup, a link leads to http or https only, and nothing is
// loaded: `element.textContent` is the only way in.
"use strict";

// Each of these takes linear time, whatever a model writes.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const INLINE = /(`{1,8})([^`]+)\1(?!`)|\*\*([^*\s](?:[^*\n]*[^*\s])?)\*\*|\*([^*\s](?:[^*\n]*[^*\s])?)\*|~~([^~\n]+)~~|!?\[([^[\]\n]{0,500})\]\((https?:\/\/[^\s()<>]{1,2000})\)/g;
const LONGEST = 200000; // letters that are looked through each time a piece comes
const DEEPEST = 8; // levels of quotes and lists

function made(name, text = "") {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}

function link(text, address) {
  const anchor = made("a", text || address);
  anchor.href = address;
  anchor.title = address;
  anchor.target = "_blank";
  anchor.rel = "noopener noreferrer nofollow";
  return anchor;
}

function addInline(parent, text) {
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(at, found.index));
    at = found.index + found[0].length;
    const [, , code, strong, emphasis, struck, words, address] = found;
    if (code !== undefined) parent.append(made("code", code.trim()));
    else if (strong !== undefined) parent.append(addInline(made("strong"), strong));
    else if (emphasis !== undefined) parent.append(addInline(made("em"), emphasis));
    else if (struck !== undefined) parent.append(made("s", struck));
    else parent.append(link(words, address));
  }
  parent.append(text.slice(at));
  return parent;
}

export function codeBlock(language, lines) {
  const block = made("figure");
  block.className = "code";
  const caption = made("figcaption", language || "code");
  const copy = made("button", "Copy");
  copy.type = "button";
  copy.className = "copy";
  caption.append(copy);
  const pre = made("pre");
  pre.append(made("code", lines.join("\n")));
  pre.tabIndex = 0; // scrolls by keyboard
  block.append(caption, pre);
  return block;
}

function takeWhile(lines, from, belongs) {
  let end = from;
  while (end < lines.length && belongs(lines[end])) end += 1;
  return end;
}

function fenced(parent, lines, at) {
  const [, fence, information] = lines[at].match(FENCE);
  const closes = (line) => {
    const trimmed = line.trim();
    return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
  };
  const end = takeWhile(lines, at + 1, (line) => !closes(line)); // the end of the text, while it still comes in
  parent.append(codeBlock(information.trim().split(/\s/)[0].slice(0, 30), lines.slice(at + 1, end)));
  return end + 1;
}

function list(parent, lines, at, depth) {
  const [, indent, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const element = made(ordered ? "ol" : "ul");
  if (ordered) element.start = parseInt(mark, 10);
  const isNext = (line) => {
    const found = line.match(ITEM);
    return found !== null && found[1].length === indent.length && /\d/.test(found[2]) === ordered;
  };
  while (at < lines.length && isNext(lines[at])) {
    const inside = indent.length + 1;
    const end = takeWhile(lines, at + 1, (line) => line.trim() !== "" && line.search(/\S/) >= inside);
    const body = lines.slice(at + 1, end).map((line) => line.slice(Math.min(line.search(/\S/), inside + 1)));
    element.append(blocks(made("li"), [lines[at].match(ITEM)[3], ...body], depth + 1));
    at = end;
    if (at + 1 < lines.length && lines[at].trim() === "" && isNext(lines[at + 1])) at += 1;
  }
  parent.append(element);
  return at;
}

function withoutMarks(heading) {
  const words = heading.trim();
  let end = words.length;
  while (end > 0 && words[end - 1] === "#") end -= 1;
  return end === 0 || words[end - 1] === " " ? words.slice(0, end).trim() : words; // "C#" keeps its own
}

function isPlain(line) {
  return line.trim() !== "" && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));
}

function blocks(parent, lines, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (line.trim() === "") at += 1;
    else if (depth < DEEPEST && FENCE.test(line)) at = fenced(parent, lines, at);
    else if (HEADING.test(line)) {
      const [, marks, words] = line.match(HEADING);
      parent.append(addInline(made(`h${Math.min(6, marks.length + 2)}`), withoutMarks(words)));
      at += 1;
    } else if (RULE.test(line)) {
      parent.append(made("hr"));
      at += 1;
    } else if (depth < DEEPEST && QUOTE.test(line)) {
      const end = takeWhile(lines, at, (one) => QUOTE.test(one));
      parent.append(blocks(made("blockquote"), lines.slice(at, end).map((one) => one.replace(QUOTE, "")), depth + 1));
      at = end;
    } else if (depth < DEEPEST && ITEM.test(line)) at = list(parent, lines, at, depth);
    else {
      const end = Math.max(at + 1, takeWhile(lines, at, isPlain));
      parent.append(addInline(made("p"), lines.slice(at, end).join("\n")));
      at = end;
    }
  }
  return parent;
}

export function showMarkdown(parent, text) {
  parent.replaceChildren();
  if (text.length > LONGEST) parent.append(made("p", text));
  else blocks(parent, text.split(/\r?\n/), 0);
}
