"""The page in a browser, without a network: filters, keys, colours, two trajectories side by side, hostile texts."""

import shutil
from pathlib import Path

import pytest
from viewer_cases import HOSTILE, INVISIBLE, make_many, named

from flowgrpo.report import trajectory_page
from flowgrpo.report.trajectory_page import write_viewer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs a browser: apt-get install chromium chromium-driver, and '.[test]'"
    ),
]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,800")
TITLE = f"Roll{INVISIBLE}outs"
OPENED = "return [...document.querySelectorAll('article')].map(each => each.querySelector('.place').textContent)"


def phases(**solved: str) -> str:
    """The lines of the phases below the count, such as before="3 of 6 solved (50 %)"."""
    names = {"before": "test before", "train": "train", "after": "test after"}
    return "".join(f"\n{names[phase]} {words}" for phase, words in solved.items())


TRAINED = phases(train="6 of 6 solved (100 %)")
FILTERS = [
    ("domain", "code", f"8 of 20{TRAINED}"),
    ("phase", "test before", "6 of 20" + phases(before="0 of 6 solved (0 %)")),
    ("result", "invalid", "2 of 20"),
    ("status", "VERIFIER_FAILURE", "2 of 20"),
    ("tool", "calculator", "12 of 20" + phases(before="0 of 6 solved (0 %)", after="3 of 6 solved (50 %)")),
    ("changed", "failed → solved", "6 of 20" + phases(before="0 of 3 solved (0 %)", after="3 of 3 solved (100 %)")),
    ("turns-low", "3", f"6 of 20{TRAINED}"),
    ("outcome-high", "0.5", "9 of 20" + phases(before="0 of 6 solved (0 %)", after="0 of 3 solved (0 %)")),
    ("update-low", "4", f"8 of 20{TRAINED}"),
    ("search", "T3 what", "2 of 20" + phases(before="0 of 1 solved (0 %)", after="1 of 1 solved (100 %)")),
    ("search", "nowhere", "0 of 20"),
]


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    names = {"ratio": "π(update 9) / π(sampled)"}
    return write_viewer(make_many(), tmp_path_factory.mktemp("page") / "page.html", title=TITLE, names=names)


@pytest.fixture
def page(browser, path):
    """The page as first opened; no test may cause an error in the console."""
    browser.get("about:blank")
    browser.get(path.as_uri())
    yield browser
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    assert browser.title == browser.find_element("tag name", "h1").text == named(TITLE)


def press(page, keys: str) -> None:
    page.find_element("css selector", "body").send_keys(keys)


def choose(page, name: str, value: str) -> str:
    """Set a filter; what is counted then."""
    page.execute_script(
        "const field = document.getElementById('filters').elements[arguments[0]];"
        "field.value = arguments[1]; field.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        value,
    )
    return page.find_element("id", "count").text


def backgrounds(page) -> list[str]:
    return page.execute_script(
        "return [...document.querySelectorAll('.action .t')].map(t => getComputedStyle(t).backgroundColor)"
    )


def opened(page) -> list[str]:
    return page.execute_script(OPENED)


def test_filters_count_solved_trajectories_by_phase(page):
    for name, value, counted in FILTERS:
        assert choose(page, name, value) == counted, name
        page.find_element("css selector", "#filters [type=reset]").click()
        text = "setTimeout(() => arguments[0](document.getElementById('count').textContent), 20)"
        assert page.execute_async_script(text).startswith("20 of 20test before")
    choose(page, "domain", "mathematics")
    assert choose(page, "result", "solved").startswith("3 of 20")
    assert choose(page, "turns-low", "many").startswith("3 of 20")  # what is no number bounds nothing
    assert page.find_element("name", "turns-low").get_attribute("aria-invalid") == "true"
    choose(page, "sort", "outcome, high first")
    shown = [each.text for each in page.find_elements("css selector", ".row .outcome")]
    assert shown == sorted(shown, key=lambda text: -1.0 if text == "\u2013" else float(text), reverse=True)
    source = (Path(trajectory_page.__file__).parent / "page" / "data.js").read_text()
    number = next(line for line in source.splitlines() if line.startswith("const number"))
    rounded = page.execute_script(f"{number}\nreturn [-0.004, -0.006, 0, -12.5].map((value) => number(value))")
    assert rounded == ["0.00", "\u22120.01", "0.00", "\u221212.50"]  # what rounds to zero has no sign


def test_keys_move_through_trajectories_and_turns(page):
    assert "test after" in opened(page)[0]
    assert "t0" in opened(page)[0]
    press(page, "jj")
    assert "t2" in opened(page)[0]
    press(page, "k")
    assert "t1" in opened(page)[0]
    press(page, "G")
    assert "test before" in opened(page)[0]
    press(page, "gn")
    current = "return [...document.querySelectorAll('.turn')].findIndex(turn => turn.classList.contains('current'))"
    assert page.execute_script(current) == 0
    press(page, "n")
    assert page.execute_script(current) == 1
    press(page, "p")
    assert page.execute_script(current) == 0
    press(page, "?")
    assert page.execute_script("return document.getElementById('help').open")
    press(page, "\ue00c")
    assert not page.execute_script("return document.getElementById('help').open")
    press(page, "/")  # the search takes its keys, and gives them back
    search = page.switch_to.active_element
    search.send_keys("t4jj")
    assert page.find_element("id", "count").text == "0 of 20"
    search.send_keys("\ue003\ue003\ue00c")  # two backspaces, escape
    press(page, "j")
    assert "test before" in opened(page)[0]


def test_every_colouring_has_colours_and_a_legend(page):
    press(page, "cc")
    assert "not recorded for this trajectory" in page.find_element("id", "legend").text
    press(page, "CC")
    choose(page, "domain", "code")
    clear = "rgba(0, 0, 0, 0)"
    legend = page.find_element("id", "legend")
    masks = backgrounds(page)
    assert len(set(masks)) == 1
    assert masks[0] != clear
    colours = {}
    for name in ("log-probability", "advantage", "π(update 9) / π(sampled)", "weight version"):
        press(page, "c")
        assert legend.text.startswith(name)
        colours[name] = backgrounds(page)
    assert len(set(colours["log-probability"])) == 3  # 0, -1, -2 of the longest action
    advantages, ratios = colours["advantage"], colours["π(update 9) / π(sampled)"]
    assert advantages[0] != advantages[1] == advantages[3] == advantages[4] != clear
    assert ratios[0] != ratios[1]
    assert len(set(colours["weight version"])) == 2
    press(page, "c")
    assert legend.text.startswith("mask")


def test_tokens_show_their_values_and_are_coloured_without_spaces(page):
    pieces = "return [...document.querySelectorAll('.action .t')].slice(0, 4).map(each => each.textContent)"
    assert page.execute_script(pieces) == ["Tool:", "calculator", "2", "+"]
    assert page.find_element("css selector", ".action").get_attribute("textContent") == "Tool: calculator 2 + "
    choose(page, "domain", "code")
    press(page, "\ue014")  # right
    tip = page.find_element("id", "tip").text.split("\n")
    assert tip[tip.index("token id") + 1].isdigit()
    press(page, "n\ue014")
    words = page.find_element("id", "tip").text
    assert "chosen" in words
    assert "+0.5000" in words
    assert "1.2500" in words


def test_contexts_fold_and_unfold(page):
    opens = "return [...document.querySelectorAll('details.context')].map(each => each.open)"
    assert page.execute_script(opens) == [True, True]
    press(page, "f")
    assert page.execute_script(opens) == [False, False]
    press(page, "jf")
    assert page.execute_script(opens) == [True, True]
    assert len(page.find_elements("css selector", ".prompt .t")) == 4
    choose(page, "domain", "code")  # a turn whose action was refused leads to what its policy was told
    press(page, "f")
    page.find_element("css selector", ".refused button").click()
    assert page.execute_script(opens) == [False, False, True]
    assert page.execute_script("return document.querySelectorAll('.turn')[2].classList.contains('current')")


def test_same_task_before_and_after_is_shown_side_by_side(page):
    choose(page, "phase", "test after")
    press(page, "jjjb")
    before, after = opened(page)
    assert "test before" in before
    assert "test after" in after
    assert "t3" in before
    assert "t3" in after
    press(page, "n")
    assert page.execute_script("return document.querySelectorAll('.turn.current').length") == 2
    press(page, "b")
    assert len(opened(page)) == 1


def test_url_restores_the_view(page, path):
    choose(page, "domain", "code")
    press(page, "jcb")
    address, shown = page.current_url, opened(page)
    page.get("about:blank")
    page.get(address)
    assert address.startswith(path.as_uri() + "#")
    assert opened(page) == shown
    assert page.find_element("id", "legend").text.startswith("log-probability")


def test_hostile_text_is_shown_as_text(page):
    choose(page, "result", "invalid")
    assert page.find_element("css selector", "h2").text == named(HOSTILE)
    assert page.find_elements("css selector", "main img, main script") == []
    assert page.find_element("css selector", ".prompt").text.replace("\n", "").startswith("</script>")
    press(page, "j")
    words = page.find_element("tag name", "main").text
    assert "never began" in words
    assert "none: it ended before" in words


def test_calls_and_outcome_are_shown(page):
    words = page.find_element("tag name", "article").text
    for part in ("calculator", "2 +", "it is not complete", "error", "Gold", "5", "failed", "outcome 0.250", "1.50 s"):
        assert part in words


def test_narrow_window_has_filters_on_demand(page):
    metrics = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.refresh()
        heights = "return [...document.querySelectorAll('.segments label')].map(each => each.offsetHeight)"
        assert len(set(page.execute_script(heights))) == 1
        assert page.execute_script("return document.documentElement.scrollWidth") == 420
        assert not page.find_element("name", "domain").is_displayed()
        page.find_element("id", "more").click()
        assert page.find_element("name", "domain").is_displayed()
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
