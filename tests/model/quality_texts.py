"""Texts of several kinds that the model did not write, and an answer that it did, for measuring
what our arithmetic costs. Each is longer than 64 tokens."""

QUESTION = "Explain how rain forms."
ANSWER = (  # the model's own greedy answer
    "Rain is formed when water from the atmosphere interacts with the Earth's surface. The process "
    "begins with evaporation, where water from the Earth's oceans, lakes, and rivers heats up and "
    "turns into water vapor. This process is driven by the sun's heat, which causes water "
    "molecules to break down and release heat energy.\n\nAs the water vapor rises"
)
FOREIGN = {
    "prose": (
        "The lighthouse stood at the end of the harbour wall, and every evening the keeper climbed "
        "its narrow stairs to light the lamp. In winter the waves broke over the rocks and the "
        "wind shook the windows, but the light never went out. Sailors who came home after many "
        "months at sea looked for it first, long before they could see the houses of the town."
    ),
    "legal": (
        "The tenant shall pay the rent on the first day of each calendar month without deduction. "
        "If the premises are damaged by fire or flood so that they cannot be used, the obligation "
        "to pay rent is suspended until the landlord has repaired them. Neither party may assign "
        "its rights under this agreement without the prior written consent of the other, which "
        "consent shall not be unreasonably withheld. Notices must be given in writing."
    ),
    "code": (
        "def merge(left: list[int], right: list[int]) -> list[int]:\n"
        '    """Join two sorted lists into one sorted list."""\n'
        "    merged = []\n"
        "    i = j = 0\n"
        "    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n"
        "            merged.append(left[i])\n"
        "            i += 1\n"
        "        else:\n"
        "            merged.append(right[j])\n"
        "            j += 1\n"
        "    return merged + left[i:] + right[j:]\n"
    ),
    "news": (
        "The city council voted on Tuesday to rebuild the old bridge across the river, which has "
        "been closed to traffic since the storm in March. Engineers estimate that the work will "
        "take eighteen months and cost about forty million dollars. Shop owners on the east side "
        "welcomed the decision, saying that they had lost a third of their customers. The mayor "
        "said that a ferry would run every twenty minutes until the new bridge opens."
    ),
    "letter": (
        "Hi Anna, thanks for your message! I'm sorry that I could not come to the party last week; "
        "my train was cancelled and the next one left three hours later. How was it? Did your "
        "brother bring his new guitar? I would love to meet for coffee on Saturday if you have "
        "time. There is a small place near the station that makes really good cake. Let me know "
        "what works for you, and say hello to your parents from me."
    ),
}
