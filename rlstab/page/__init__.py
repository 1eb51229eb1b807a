"""The frame, the style, the script and the parts that all HTML pages of rlstab share."""
