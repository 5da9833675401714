"""A program that plays the policy's seats with an agent of smolagents, which calls the policy in
several steps a turn and uses a tool. Its own prompts are short, for small models.

    pip install smolagents openai
    python examples/agent/smol.py &      # then the run, as in program.py
"""

from program import URL, serve
from smolagents import EMPTY_PROMPT_TEMPLATES, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: float, b: float) -> float:
    """The sum of two numbers.

    Args:
        a: a number
        b: a number
    """
    return a + b


def play(client, turn):
    """The agent's final answer; its memory is new each turn, since the messages have the game."""
    model = OpenAIModel(turn["model"], api_base=URL, api_key=client.api_key, tool_choice="auto")
    prompts = EMPTY_PROMPT_TEMPLATES | {
        "system_prompt": "Call final_answer with your move.",
        "final_answer": {"pre_messages": "The game:", "post_messages": "Now your move."},
    }
    agent = ToolCallingAgent([add], model, prompt_templates=prompts, max_steps=2, verbosity_level=0)
    task = "\n\n".join(each["content"] for each in turn["messages"])
    return str(agent.run(task))


if __name__ == "__main__":
    serve(play)
