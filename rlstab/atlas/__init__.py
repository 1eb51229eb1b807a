"""The atlas of methods: pictures of what each does to tokens, a gallery of them, and a map by source of instability."""
