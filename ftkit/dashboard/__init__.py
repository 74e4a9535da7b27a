"""How a job is shown: its keys read into a report, a timeline and a live board for browser and terminal."""
