"""Images, video and audio: from a client's bytes to what a tower reads. Decoding runs in its own processes, under limits."""
