"""The page in a browser, without a network: filters, keys, colours, two trajectories side by side, hostile texts."""

import shutil

import pytest
from shown_cases import HOSTILE, make_many

from flowgrpo.report.viewer import viewer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = "needs a browser: apt-get install chromium chromium-driver, and '.[test]'"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=NEEDED)]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,800")
ESCAPE, BACKSPACE = "\ue00c", "\ue003"


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
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    names = {"ratio": "π(update 9) / π(sampled)"}
    return viewer(make_many(), tmp_path_factory.mktemp("page") / "page.html", title="Rollouts", names=names)


@pytest.fixture
def page(browser, path):
    """The page as it is first opened; whatever a test does, nothing is complained of."""
    browser.get("about:blank")
    browser.get(path.as_uri())
    yield browser
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    assert browser.title == "Rollouts"


def press(page, keys: str) -> None:
    page.find_element("css selector", "body").send_keys(keys)


def choose(page, name: str, value: str) -> str:
    """Set a filter; what is counted then."""
    script = """
        const field = document.getElementById('filters').elements[arguments[0]];
        field.value = arguments[1]; field.dispatchEvent(new Event('input', {bubbles: true}))"""
    page.execute_script(script, name, value)
    return page.find_element("id", "count").text


def texts(page, selector: str) -> list[str]:
    return page.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector
    )


def opened(page) -> list[str]:
    return texts(page, "article .place")


FILTERS = [
    ("domain", "code", "8 of 20, 6 solved (100 %)"),
    ("phase", "test before", "6 of 20, 0 solved (0 %)"),
    ("outcome", "invalid", "2 of 20"),
    ("tool", "calculator", "12 of 20, 3 solved (25 %)"),
    ("changed", "failed → solved", "6 of 20, 3 solved (50 %)"),
    ("turns-low", "3", "6 of 20, 6 solved (100 %)"),
    ("reward-high", "0.5", "9 of 20, 0 solved (0 %)"),
    ("update-low", "4", "8 of 20, 6 solved (100 %)"),
    ("search", "T3 what", "2 of 20, 1 solved (50 %)"),
]


def test_filters_count_what_passes_and_combine(page):
    for name, value, counted in FILTERS:
        assert choose(page, name, value) == counted
        page.find_element("css selector", "#filters [type=reset]").click()
        page.execute_async_script("setTimeout(arguments[0], 50)")
        assert page.find_element("id", "count").text.startswith("20 of 20")
    choose(page, "domain", "mathematics")
    assert choose(page, "outcome", "solved").startswith("3 of 20")
    assert choose(page, "turns-low", "many").startswith("3 of 20")  # no number bounds nothing
    assert page.find_element("name", "turns-low").get_attribute("aria-invalid") == "true"


def test_keys_go_through_trajectories_and_turns_search_and_help(page):
    for keys, place in (("", "t0"), ("jj", "t2"), ("k", "t1"), ("G", "c2")):
        press(page, keys)
        assert place in opened(page)[0]
    current = "return [...document.querySelectorAll('.turn')].findIndex(turn => turn.classList.contains('current'))"
    for keys, turn in (("gn", 0), ("n", 1), ("p", 0)):
        press(page, keys)
        assert page.execute_script(current) == turn
    press(page, "/")
    page.switch_to.active_element.send_keys("t4jj")
    assert page.find_element("id", "count").text.startswith("0 of 20")
    page.switch_to.active_element.send_keys(BACKSPACE * 2 + ESCAPE)
    press(page, "j")
    assert "test after" in opened(page)[0]
    for keys, opens in (("?", True), (ESCAPE, False)):
        press(page, keys)
        assert page.execute_script("return document.getElementById('help').open") == opens


def test_every_colouring_has_its_legend_and_one_that_is_not_there_says_why(page):
    press(page, "cc")
    assert "not recorded for this trajectory" in page.find_element("id", "legend").text
    choose(page, "domain", "code")
    for name in ("advantage", "π(update 9) / π(sampled)", "weight version", "mask", "log-probability"):
        assert page.find_element("id", "legend").text.startswith(name)
        press(page, "c")


def test_the_same_task_before_and_after_stands_side_by_side_and_an_address_opens_the_same_again(page, path):
    choose(page, "phase", "test after")
    press(page, "jjjb")
    for place, phase in zip(opened(page), ("test before", "test after"), strict=True):
        assert phase in place
        assert "t3" in place
    press(page, "nc")
    assert len(texts(page, ".turn.current")) == 2
    address, shown = page.current_url, opened(page)
    page.get("about:blank")
    page.get(address)
    assert address.startswith(path.as_uri() + "#")
    assert opened(page) == shown
    assert page.find_element("id", "legend").text.startswith("log-probability")
    press(page, "b")
    assert len(opened(page)) == 1


def test_calls_and_verdicts_are_shown_and_hostile_text_does_nothing(page):
    words = page.find_element("tag name", "article").text
    for part in ("calculator", "2 +", "it is not complete", "error", "Gold", "5", "failed", "reward 0.250", "1.50 s"):
        assert part in words
    choose(page, "outcome", "invalid")
    assert page.find_element("css selector", "h2").text == HOSTILE.replace("\u202e", "⟨U+202E⟩")
    assert texts(page, "main img, main script") == []
    assert page.find_element("css selector", ".said").text.replace("\n", "").startswith("</script>")
    press(page, "j")
    assert "never began" in page.find_element("tag name", "main").text
