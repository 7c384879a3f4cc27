"""Progress: one line per interval where there is no terminal, nothing on other ranks."""

from experiments.progress import Progress


def test_lines_name_step_figures_and_time_left(capsys):
    progress = Progress(0, 200, shown=True)
    progress.advance()
    progress.show(100, {"loss": "1.25", "tok/s": "9,000"})
    progress.say("done")
    progress.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 100/200  loss 1.25  tok/s 9,000  left 0:00:0")
    assert second == "done"


def test_other_ranks_say_nothing(capsys):
    progress = Progress(0, 200, shown=False)
    progress.show(100, {"loss": "1.25"})
    progress.say("done")
    assert capsys.readouterr().out == ""
