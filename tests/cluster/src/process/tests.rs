use super::*;

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdin(Stdio::null());
    command
}

const SHORT: Limit = Limit::total(Duration::from_secs(60));

#[test]
fn total_limit_precedes_silence() {
    let limit = Limit::total(Duration::from_secs(10)).silence(Duration::from_secs(5));
    let exceeded =
        |running, silent| limit.exceeded(Duration::from_secs(running), Duration::from_secs(silent));
    assert_eq!(exceeded(9, 4), None);
    assert_eq!(
        exceeded(9, 5),
        Some(Overrun::Silence(Duration::from_secs(5)))
    );
    assert_eq!(
        exceeded(10, 5),
        Some(Overrun::Total(Duration::from_secs(10)))
    );
}

#[test]
fn returns_output_and_status() {
    let output = output(&mut shell("echo out; echo err >&2; exit 3"), SHORT).unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(
        (output.stdout, output.stderr),
        (b"out\n".to_vec(), b"err\n".to_vec())
    );
}

#[test]
fn passes_input() {
    let mut cat = Command::new("cat");
    let output = output(cat.stdin(input(b"text").unwrap()), SHORT).unwrap();
    assert_eq!(output.stdout, b"text");
}

#[test]
fn splits_lines() {
    let mut seen = Vec::new();
    let mut command = shell("printf 'one\ntwo\nrest'");
    lines(&mut command, Stream::Stdout, SHORT, |line| {
        seen.push(line.to_owned());
        Ok(())
    })
    .unwrap();
    assert_eq!(seen, ["one", "two", "rest"]);
}

#[test]
fn kills_silent_program_with_its_children() {
    let limit = SHORT.silence(Duration::from_millis(300));
    let mut printed = Vec::new();
    let end = run_merged(&mut shell("sleep 1000 & echo $!; wait"), limit, |bytes| {
        printed.extend_from_slice(bytes);
        Ok(())
    })
    .unwrap();
    let End::Killed { overrun, processes } = end else {
        panic!("not killed: {end:?}");
    };
    assert_eq!(overrun, Overrun::Silence(Duration::from_millis(300)));
    assert!(
        processes.iter().any(|line| line.ends_with("sleep 1000")),
        "{processes:?}"
    );
    let child = String::from_utf8(printed).unwrap();
    let proc = std::path::Path::new("/proc").join(child.trim());
    let deadline = Instant::now() + Duration::from_secs(60);
    // A killed process is a zombie until its new parent collects it.
    while fs::read_to_string(proc.join("cmdline")).is_ok_and(|text| !text.is_empty()) {
        assert!(Instant::now() < deadline, "the child still runs");
        thread::sleep(POLL);
    }
}

#[test]
fn names_program_and_limit() {
    let limit = Limit::total(Duration::from_millis(100));
    let error = status(Command::new("sleep").arg("1000"), limit).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("sleep 1000: killed after 0 s"),
        "{error}"
    );
}

#[test]
fn watchdog_kills_program_that_hangs() {
    let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
    let watchdog = Watchdog::start(&child, Duration::from_millis(50)).unwrap();
    assert!(!child.wait().unwrap().success());
    drop(watchdog);
}

#[test]
fn reads_state_after_any_name() {
    assert_eq!(state_and_group("7 (a) b) S 1 42 42 0"), Some(("S", 42)));
    assert_eq!(state_and_group(""), None);
}
