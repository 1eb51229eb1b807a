"use strict";
const root = document.documentElement, by = (id) => document.getElementById(id);
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
const number = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(3))));
