"""Checks of a page in a browser."""

from playwright.async_api import Page

_FAINT_TEXTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const channels = (colour) => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      known.set(colour, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const luminance = ([red, green, blue]) => {
    const [r, g, b] = [red, green, blue].map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (channels(colour)[3] === 255) return channels(colour);
    }
    return [255, 255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("option, .unseen")) continue;
    const [one, other] = [luminance(channels(getComputedStyle(element).color)), luminance(ground(element))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) faint.push(`${ratio.toFixed(2)} ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  return faint;
}"""

_UNNAMED_CONTROLS = """() =>
  [...document.querySelectorAll("input:not([type=hidden]), select, textarea, button, a[href]")]
  .filter((control) => control.checkVisibility())
  .filter((control) => {
    const labels = [...(control.labels ?? [])].map((label) => label.textContent.trim()).join("");
    return !(labels || control.getAttribute("aria-label") || control.textContent.trim());
  })
  .map((control) => control.outerHTML.slice(0, 100))"""


async def find_faint_texts(page: Page) -> list[str]:
    """Texts with a contrast below 4.5 to their background."""
    found: list[str] = await page.evaluate(_FAINT_TEXTS)
    return found


async def find_unnamed_controls(page: Page) -> list[str]:
    """Controls without an accessible name."""
    found: list[str] = await page.evaluate(_UNNAMED_CONTROLS)
    return found
