// A browser starts no Worker for a page that was opened as a file: there, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const post = data => {
        const event = new MessageEvent("message", { data });
        if (this.onmessage) this.onmessage(event);
        this.dispatchEvent(event);
      };
      this.inside.postMessage = data => setTimeout(post, 0, data);
      this.inside.importScripts = (...urls) => Promise.all(urls.map(address => this.load(address)));
      this.ready = this.load(url);
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = resolve;
        script.onerror = reject;
        this.inside.document.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => {
        const event = new this.inside.MessageEvent("message", { data });
        if (this.inside.onmessage) this.inside.onmessage(event);
        this.inside.dispatchEvent(event);
      });
    }
  };
}
