"""The tables of facts: name -> (rows "subject = value; ...", questions "... | ...", answers "... | ...")."""

from __future__ import annotations

_CAPITALS = """
France = Paris; Germany = Berlin; Italy = Rome; Spain = Madrid; Portugal = Lisbon; England = London; Scotland = Edinburgh; Wales = Cardiff;
Ireland = Dublin; the Netherlands = Amsterdam; Belgium = Brussels; Luxembourg = Luxembourg; Switzerland = Bern; Austria = Vienna;
Poland = Warsaw; the Czech Republic = Prague; Slovakia = Bratislava; Hungary = Budapest; Romania = Bucharest; Bulgaria = Sofia;
Greece = Athens; Turkey = Ankara; Denmark = Copenhagen; Norway = Oslo; Sweden = Stockholm; Finland = Helsinki; Iceland = Reykjavik;
Estonia = Tallinn; Latvia = Riga; Lithuania = Vilnius; Ukraine = Kyiv; Russia = Moscow; Serbia = Belgrade; Croatia = Zagreb;
Slovenia = Ljubljana; Albania = Tirana; Malta = Valletta; Cyprus = Nicosia; Egypt = Cairo; Morocco = Rabat; Algeria = Algiers;
Tunisia = Tunis; Libya = Tripoli; Ethiopia = Addis Ababa; Kenya = Nairobi; Uganda = Kampala; Ghana = Accra; Nigeria = Abuja;
Senegal = Dakar; South Africa = Pretoria; Zimbabwe = Harare; Madagascar = Antananarivo; China = Beijing; Japan = Tokyo; South Korea = Seoul;
North Korea = Pyongyang; Mongolia = Ulaanbaatar; India = New Delhi; Pakistan = Islamabad; Bangladesh = Dhaka; Nepal = Kathmandu;
Thailand = Bangkok; Vietnam = Hanoi; Indonesia = Jakarta; Malaysia = Kuala Lumpur; the Philippines = Manila; Iran = Tehran; Iraq = Baghdad;
Saudi Arabia = Riyadh; Israel = Jerusalem; Jordan = Amman; Lebanon = Beirut; Syria = Damascus; Afghanistan = Kabul; Australia = Canberra;
New Zealand = Wellington; the United States = Washington; Canada = Ottawa; Mexico = Mexico City; Cuba = Havana; Jamaica = Kingston;
Brazil = Brasilia; Argentina = Buenos Aires; Chile = Santiago; Peru = Lima; Colombia = Bogota; Venezuela = Caracas; Ecuador = Quito;
Bolivia = La Paz; Uruguay = Montevideo; Paraguay = Asuncion
"""
_FLIPPED = ";".join(
    f"{v.strip()} = {k.strip()}"
    for k, _, v in (row.partition("=") for row in _CAPITALS.replace("\n", " ").split(";"))
    if k.strip() != v.strip()
)
_OPPOSITES = """
hot = cold; big = small; tall = short; long = short; fast = slow; old = young; new = old; light = dark; heavy = light; happy = sad;
good = bad; rich = poor; strong = weak; hard = soft; wet = dry; full = empty; open = closed; early = late; high = low; loud = quiet;
clean = dirty; easy = difficult; thick = thin; wide = narrow; deep = shallow; up = down; left = right; in = out; on = off; day = night;
summer = winter; love = hate; begin = end; win = lose; buy = sell; push = pull; give = take; ask = answer; come = go; laugh = cry;
alive = dead; true = false; near = far; first = last; inside = outside; always = never; many = few; sweet = sour; brave = cowardly;
polite = rude; safe = dangerous; right = wrong; front = back; top = bottom; north = south; east = west; black = white; sharp = blunt;
smooth = rough; awake = asleep; before = after; remember = forget; arrive = leave; war = peace; friend = enemy; success = failure
"""
_PLURALS = """
cat = cats; dog = dogs; box = boxes; bus = buses; baby = babies; city = cities; child = children; man = men; woman = women; foot = feet;
tooth = teeth; mouse = mice; goose = geese; sheep = sheep; fish = fish; deer = deer; leaf = leaves; knife = knives; wolf = wolves;
wife = wives; life = lives; shelf = shelves; person = people; ox = oxen; tomato = tomatoes; potato = potatoes; hero = heroes;
photo = photos; piano = pianos; key = keys; toy = toys; berry = berries; story = stories; fox = foxes; watch = watches; dish = dishes;
glass = glasses; brush = brushes; church = churches; book = books; apple = apples; house = houses; half = halves; thief = thieves; loaf = loaves
"""
_PAST = """
go = went; see = saw; eat = ate; drink = drank; run = ran; swim = swam; sing = sang; write = wrote; read = read; speak = spoke;
give = gave; take = took; come = came; get = got; make = made; do = did; have = had; say = said; tell = told; think = thought; buy = bought;
bring = brought; teach = taught; catch = caught; find = found; know = knew; grow = grew; fly = flew; draw = drew; throw = threw; break = broke;
choose = chose; drive = drove; ride = rode; rise = rose; fall = fell; feel = felt; keep = kept; sleep = slept; leave = left; meet = met;
sit = sat; stand = stood; win = won; lose = lost; build = built; send = sent; spend = spent; sell = sold; hold = held; hear = heard;
walk = walked; play = played; work = worked; look = looked; ask = asked; help = helped; try = tried; stop = stopped; carry = carried; dance = danced
"""
_AUTHORS = """
Romeo and Juliet = William Shakespeare; Hamlet = William Shakespeare; Macbeth = William Shakespeare; Oliver Twist = Charles Dickens;
A Christmas Carol = Charles Dickens; Great Expectations = Charles Dickens; Pride and Prejudice = Jane Austen; Emma = Jane Austen;
Frankenstein = Mary Shelley; Dracula = Bram Stoker; Moby Dick = Herman Melville; Tom Sawyer = Mark Twain; Alice in Wonderland = Lewis Carroll;
The Jungle Book = Rudyard Kipling; Treasure Island = Robert Louis Stevenson; Robinson Crusoe = Daniel Defoe; Gulliver's Travels = Jonathan Swift;
War and Peace = Leo Tolstoy; Anna Karenina = Leo Tolstoy; Crime and Punishment = Fyodor Dostoevsky; Don Quixote = Miguel de Cervantes;
Les Miserables = Victor Hugo; The Three Musketeers = Alexandre Dumas; Around the World in Eighty Days = Jules Verne; Faust = Goethe;
The Little Mermaid = Hans Christian Andersen; The Odyssey = Homer; The Iliad = Homer; The Divine Comedy = Dante; The Time Machine = H. G. Wells;
Sherlock Holmes = Arthur Conan Doyle; The Hobbit = J. R. R. Tolkien; The Little Prince = Antoine de Saint-Exupery; Peter Pan = J. M. Barrie;
Jane Eyre = Charlotte Bronte; Wuthering Heights = Emily Bronte; Animal Farm = George Orwell; Pinocchio = Carlo Collodi
"""
_YOUNG = """
dog = puppy; cat = kitten; cow = calf; horse = foal; sheep = lamb; pig = piglet; goat = kid; chicken = chick; duck = duckling; goose = gosling;
lion = cub; bear = cub; tiger = cub; deer = fawn; frog = tadpole; kangaroo = joey; swan = cygnet; owl = owlet; eagle = eaglet; fox = cub;
wolf = pup; seal = pup; elephant = calf; whale = calf; butterfly = caterpillar
"""
_ELEMENTS = """
hydrogen = H; helium = He; lithium = Li; carbon = C; nitrogen = N; oxygen = O; fluorine = F; neon = Ne; sodium = Na; magnesium = Mg;
aluminium = Al; silicon = Si; phosphorus = P; sulphur = S; chlorine = Cl; argon = Ar; potassium = K; calcium = Ca; titanium = Ti; iron = Fe;
nickel = Ni; copper = Cu; zinc = Zn; silver = Ag; tin = Sn; iodine = I; platinum = Pt; gold = Au; mercury = Hg; lead = Pb; uranium = U
"""

TABLES: dict[str, tuple[str, str, str]] = {
    "capital": (
        _CAPITALS,
        "What is the capital of {s}? | What's the capital of {s}? | Which city is the capital of {s}? | Tell me the capital of {s}. | "
        "Capital of {s}? | Do you know the capital of {s}? | What is {s}'s capital? | What city is the capital of {s}? | "
        "I need the capital of {s}. | Could you tell me the capital of {s}? | The capital of {s} is which city?",
        "The capital of {s} is {v}. | {v} is the capital of {s}. | It is {v}. | The capital of {s} is {v}. | {s} has the capital {v}.",
    ),
    "country of a capital": (
        _FLIPPED,
        "{s} is the capital of which country? | Which country has {s} as its capital? | In which country is {s}? | Where is {s}? | "
        "What country is {s} in? | {s} is in which country? | Of which country is {s} the capital? | Where is the city of {s}?",
        "{s} is the capital of {v}. | {s} is in {v}. | {s} is the capital of {v}. | It is the capital of {v}.",
    ),
    "continent": (
        """France = Europe; Germany = Europe; Italy = Europe; Spain = Europe; Poland = Europe; Greece = Europe; Norway = Europe; Sweden = Europe;
        Portugal = Europe; Ireland = Europe; Austria = Europe; Egypt = Africa; Kenya = Africa; Nigeria = Africa; Morocco = Africa; Ghana = Africa;
        Ethiopia = Africa; South Africa = Africa; Uganda = Africa; China = Asia; Japan = Asia; India = Asia; Thailand = Asia; Vietnam = Asia;
        Nepal = Asia; Iran = Asia; South Korea = Asia; Mongolia = Asia; Indonesia = Asia; Brazil = South America; Argentina = South America;
        Chile = South America; Peru = South America; Colombia = South America; Bolivia = South America; Canada = North America;
        Mexico = North America; the United States = North America; Cuba = North America; Australia = Oceania; New Zealand = Oceania""",
        "On which continent is {s}? | What continent is {s} on? | Which continent is {s} in? | {s} is on which continent? | "
        "Tell me the continent of {s}. | In what part of the world is {s}? | {s} belongs to which continent?",
        "{s} is in {v}. | {s} is a country in {v}. | {s} lies in {v}. | It is in {v}.",
    ),
    "language": (
        """France = French; Germany = German; Italy = Italian; Spain = Spanish; Portugal = Portuguese; England = English; Poland = Polish;
        Greece = Greek; Turkey = Turkish; Denmark = Danish; Norway = Norwegian; Sweden = Swedish; Finland = Finnish; Iceland = Icelandic; Russia = Russian;
        Ukraine = Ukrainian; Hungary = Hungarian; Romania = Romanian; Egypt = Arabic; Morocco = Arabic; Iraq = Arabic; Saudi Arabia = Arabic;
        China = Chinese; Japan = Japanese; South Korea = Korean; Thailand = Thai; Vietnam = Vietnamese; Iran = Persian; Israel = Hebrew; Mexico = Spanish;
        Argentina = Spanish; Chile = Spanish; Peru = Spanish; Colombia = Spanish; Cuba = Spanish; Brazil = Portuguese; Australia = English;
        the United States = English; Austria = German; the Netherlands = Dutch; the Czech Republic = Czech; Croatia = Croatian""",
        "What language do people speak in {s}? | Which language is spoken in {s}? | What is the main language of {s}? | "
        "What language is spoken in {s}? | What do people in {s} speak? | Tell me the language of {s}.",
        "People in {s} speak {v}. | The main language of {s} is {v}. | They speak {v} in {s}. | In {s}, people speak {v}.",
    ),
    "currency": (
        """France = the euro; Germany = the euro; Italy = the euro; Spain = the euro; Ireland = the euro; Greece = the euro; England = the pound;
        the United States = the dollar; Canada = the Canadian dollar; Australia = the Australian dollar; Japan = the yen; China = the yuan; India = the rupee;
        Russia = the ruble; Switzerland = the Swiss franc; Sweden = the krona; Norway = the krone; Denmark = the krone; Poland = the zloty;
        Mexico = the peso; Brazil = the real; Turkey = the lira; South Korea = the won; Thailand = the baht; South Africa = the rand; Hungary = the forint""",
        "What money do people use in {s}? | What is the currency of {s}? | Which currency does {s} use? | What do you pay with in {s}? | "
        "What is the money of {s} called? | Tell me the currency of {s}.",
        "The currency of {s} is {v}. | People in {s} pay with {v}. | {s} uses {v}. | It is {v}.",
    ),
    "opposite": (
        _OPPOSITES,
        'What is the opposite of {s}? | What\'s the opposite of "{s}"? | Give me the opposite of {s}. | Tell me the opposite of {s}. | '
        "The opposite of {s}? | Which word means the opposite of {s}? | What is the opposite of the word {s}? | Opposite of {s}?",
        'The opposite of {s} is {v}. | It is {v}. | {v} is the opposite of {s}. | The opposite of "{s}" is "{v}".',
    ),
    "plural": (
        _PLURALS,
        'What is the plural of {s}? | What\'s the plural of "{s}"? | Tell me the plural of {s}. | Give me the plural of {s}. | '
        "The plural of {s}? | How do you write the plural of {s}? | One {s}, two what? | What is the plural form of the word {s}?",
        'The plural of {s} is {v}. | It is {v}. | One {s}, two {v}. | The plural of "{s}" is "{v}".',
    ),
    "past tense": (
        _PAST,
        'What is the past tense of {s}? | What\'s the past tense of "{s}"? | Tell me the past tense of {s}. | The past tense of {s}? | '
        "Give me the past tense of the verb {s}. | How do I say {s} in the past? | What is the simple past of {s}?",
        'The past tense of {s} is {v}. | It is {v}. | The past tense of "{s}" is "{v}". | Today I {s}, yesterday I {v}.',
    ),
    "author": (
        _AUTHORS,
        "Who wrote {s}? | Who is the author of {s}? | Which author wrote {s}? | {s} was written by whom? | Tell me who wrote {s}. | "
        "Do you know who wrote {s}? | Who is the writer of {s}?",
        "{s} was written by {v}. | {v} wrote {s}. | The author of {s} is {v}. | It was written by {v}.",
    ),
    "young animal": (
        _YOUNG,
        "What is a baby {s} called? | What do you call a baby {s}? | What is a young {s} called? | What is the name for a baby {s}? | "
        "How do we call a young {s}? | Tell me the word for a baby {s}. | A baby {s} is called what?",
        "A baby {s} is called a {v}. | A young {s} is a {v}. | It is called a {v}. | We call a baby {s} a {v}.",
    ),
    "sound": (
        """dog = barks; cat = meows; cow = moos; sheep = bleats; horse = neighs; pig = oinks; duck = quacks; lion = roars; wolf = howls; frog = croaks;
        bee = buzzes; snake = hisses; owl = hoots; rooster = crows; mouse = squeaks; bird = sings; elephant = trumpets; donkey = brays; goose = honks; crow = caws""",
        "What sound does a {s} make? | What does a {s} do when it makes a sound? | Which sound does a {s} make? | How does a {s} sound? | "
        "What noise does a {s} make? | Tell me the sound of a {s}.",
        "A {s} {v}. | The {s} {v}. | It {v}.",
    ),
    "home of an animal": (
        """bee = a hive; bird = a nest; dog = a kennel; horse = a stable; fish = water; bear = a den; rabbit = a burrow; spider = a web; ant = an anthill;
        pig = a sty; cow = a barn; lion = the savanna; camel = the desert; polar bear = the Arctic; penguin = Antarctica; monkey = trees; whale = the ocean;
        kangaroo = Australia; panda = China; fox = a den; beaver = a lodge; chicken = a coop""",
        "Where does a {s} live? | Where do you find a {s}? | What is the home of a {s}? | In what kind of place does a {s} live? | A {s} lives where? | "
        "Tell me where a {s} lives.",
        "A {s} lives in {v}. | The {s} lives in {v}. | It lives in {v}. | You can find a {s} in {v}.",
    ),
    "number of legs": (
        """dog = four; cat = four; horse = four; cow = four; spider = eight; ant = six; bee = six; fly = six; bird = two; chicken = two; person = two;
        snake = no; fish = no; octopus = eight; crab = ten; beetle = six; elephant = four; butterfly = six; penguin = two; frog = four; duck = two""",
        "How many legs does a {s} have? | How many legs has a {s}? | Tell me how many legs a {s} has. | A {s} has how many legs? | What number of legs does a {s} have?",
        "A {s} has {v} legs. | It has {v} legs. | A {s} has {v} legs.",
    ),
    "colour": (
        """the sky = blue; grass = green; snow = white; coal = black; blood = red; a banana = yellow; a lemon = yellow; an orange = orange; a tomato = red;
        a strawberry = red; the sun = yellow; a carrot = orange; a cucumber = green; milk = white; chocolate = brown; an elephant = grey; a flamingo = pink;
        a polar bear = white; a crow = black; an emerald = green; a ruby = red; a sapphire = blue; gold = yellow; a leaf = green; the sea = blue;
        a pumpkin = orange; a pig = pink; a frog = green; rice = white; coffee = brown; a cherry = red; a plum = purple; a swan = white; lavender = purple""",
        "What colour is {s}? | What color is {s}? | Which colour is {s}? | What is the colour of {s}? | Tell me the colour of {s}. | What color does {s} have? | "
        "{s} has which colour?",
        "{s} is {v}. | The colour of {s} is {v}. | It is {v}. | Usually, {s} is {v}.",
    ),
    "mixed colour": (
        """blue and yellow = green; red and yellow = orange; red and blue = purple; black and white = grey; red and white = pink; yellow and blue = green;
        yellow and red = orange; blue and red = purple; white and black = grey; white and red = pink""",
        "What colour do you get when you mix {s}? | What do {s} make? | If I mix {s}, which colour do I get? | Mix {s}: what colour is it? | "
        "What color do {s} give together?",
        "{s} make {v}. | You get {v}. | If you mix {s}, you get {v}.",
    ),
    "next day": (
        "Monday = Tuesday; Tuesday = Wednesday; Wednesday = Thursday; Thursday = Friday; Friday = Saturday; Saturday = Sunday; Sunday = Monday",
        "What day comes after {s}? | Which day is after {s}? | What is the day after {s}? | Today is {s}. What day is tomorrow? | If today is {s}, what is tomorrow? | "
        "Which day follows {s}? | After {s} comes which day?",
        "{v} comes after {s}. | The day after {s} is {v}. | It is {v}. | After {s} comes {v}.",
    ),
    "day before": (
        "Monday = Sunday; Tuesday = Monday; Wednesday = Tuesday; Thursday = Wednesday; Friday = Thursday; Saturday = Friday; Sunday = Saturday",
        "What day comes before {s}? | Which day is before {s}? | What is the day before {s}? | Today is {s}. What day was yesterday? | "
        "If today is {s}, what was yesterday? | Before {s} comes which day?",
        "{v} comes before {s}. | The day before {s} is {v}. | It is {v}. | Before {s} comes {v}.",
    ),
    "next month": (
        """January = February; February = March; March = April; April = May; May = June; June = July; July = August; August = September; September = October;
        October = November; November = December; December = January""",
        "What month comes after {s}? | Which month is after {s}? | What is the month after {s}? | Which month follows {s}? | It is {s}. What is next month? | "
        "After {s} comes which month?",
        "{v} comes after {s}. | The month after {s} is {v}. | It is {v}. | After {s} comes {v}.",
    ),
    "month before": (
        """January = December; February = January; March = February; April = March; May = April; June = May; July = June; August = July; September = August;
        October = September; November = October; December = November""",
        "What month comes before {s}? | Which month is before {s}? | What is the month before {s}? | It is {s}. What was last month? | Before {s} comes which month?",
        "{v} comes before {s}. | The month before {s} is {v}. | It is {v}. | Before {s} comes {v}.",
    ),
    "days of a month": (
        """January = 31; February = 28; March = 31; April = 30; May = 31; June = 30; July = 31; August = 31; September = 30; October = 31; November = 30; December = 31""",
        "How many days does {s} have? | How many days are in {s}? | How long is {s}? | {s} has how many days? | Tell me how many days {s} has.",
        "{s} has {v} days. | There are {v} days in {s}. | It has {v} days.",
    ),
    "element symbol": (
        _ELEMENTS,
        "What is the chemical symbol for {s}? | What is the symbol of {s}? | Which symbol does {s} have? | What's the symbol for {s}? | Tell me the symbol of {s}. | "
        "How do chemists write {s}? | Chemical symbol of {s}?",
        "The chemical symbol for {s} is {v}. | The symbol of {s} is {v}. | It is {v}. | {s} is written as {v}.",
    ),
    "planet order": (
        """Mercury = first; Venus = second; Earth = third; Mars = fourth; Jupiter = fifth; Saturn = sixth; Uranus = seventh; Neptune = eighth""",
        "Which planet from the sun is {s}? | What number is {s} counting from the sun? | Where is {s} in the order of the planets? | "
        "What place does {s} have among the planets?",
        "{s} is the {v} planet from the sun. | {s} is the {v} planet. | It is the {v} planet from the sun.",
    ),
    "planet by order": (
        """first = Mercury; second = Venus; third = Earth; fourth = Mars; fifth = Jupiter; sixth = Saturn; seventh = Uranus; eighth = Neptune""",
        "What is the {s} planet from the sun? | Which planet is the {s} one from the sun? | Name the {s} planet from the sun. | Which is the {s} planet?",
        "The {s} planet from the sun is {v}. | {v} is the {s} planet from the sun. | It is {v}.",
    ),
    "superlative": (
        """largest planet = Jupiter; smallest planet = Mercury; hottest planet = Venus; largest ocean = the Pacific Ocean; highest mountain = Mount Everest;
        largest animal = the blue whale; tallest animal = the giraffe; fastest land animal = the cheetah; largest land animal = the elephant; largest bird = the ostrich;
        smallest bird = the hummingbird; largest desert = the Sahara; largest country = Russia; smallest country = Vatican City; largest continent = Asia;
        smallest continent = Australia; coldest continent = Antarctica; longest river in Africa = the Nile; largest cat = the tiger; slowest mammal = the sloth;
        hardest natural material = diamond; lightest element = hydrogen; closest star = the sun; largest island = Greenland; longest river in South America = the Amazon;
        largest organ of the body = the skin; shortest month = February; smallest prime number = two; largest fish = the whale shark; red planet = Mars;
        biggest planet = Jupiter; biggest animal = the blue whale; biggest country = Russia; biggest ocean = the Pacific Ocean; biggest bird = the ostrich; biggest continent = Asia; planet with rings = Saturn; king of the animals = the lion; planet we live on = Earth; largest rainforest = the Amazon; deepest ocean = the Pacific Ocean""",
        "What is the {s}? | Which is the {s}? | Tell me the {s}. | What's the {s}? | Do you know the {s}? | Name the {s}. | What is the {s} called?",
        "The {s} is {v}. | It is {v}. | {v} is the {s}.",
    ),
    "count of units": (
        """seconds in a minute = 60; minutes in an hour = 60; hours in a day = 24; days in a week = 7; months in a year = 12; days in a year = 365; weeks in a year = 52;
        years in a century = 100; years in a decade = 10; seasons in a year = 4; letters in the English alphabet = 26; vowels in English = 5; cents in a dollar = 100;
        grams in a kilogram = 1000; metres in a kilometre = 1000; centimetres in a metre = 100; millimetres in a centimetre = 10; sides in a triangle = 3;
        sides in a square = 4; sides in a hexagon = 6; sides in a pentagon = 5; sides in an octagon = 8; players in a football team = 11; planets in the solar system = 8; continents in the world = 7;
        oceans in the world = 5; fingers on a hand = 5; colours in a rainbow = 7; strings on a violin = 4; strings on a guitar = 6; eggs in a dozen = 12;
        legs on a chair = 4; wheels on a bicycle = 2; wheels on a car = 4; bones in the human body = 206; teeth in an adult mouth = 32; hours in half a day = 12""",
        "How many {s}? | How many {s} are there? | Tell me how many {s} there are. | What is the number of {s}? | Do you know how many {s} there are? | There are how many {s}?",
        "There are {v} {s}. | The number of {s} is {v}.",
    ),
    "inventor": (
        """the telephone = Alexander Graham Bell; the light bulb = Thomas Edison; the printing press = Johannes Gutenberg; the radio = Guglielmo Marconi;
        the airplane = the Wright brothers; dynamite = Alfred Nobel; the World Wide Web = Tim Berners-Lee; the steam engine = James Watt; the telescope = Hans Lippershey;
        the battery = Alessandro Volta; the Braille alphabet = Louis Braille; the lightning rod = Benjamin Franklin; the diesel engine = Rudolf Diesel; Morse code = Samuel Morse""",
        "Who invented {s}? | Who is the inventor of {s}? | {s} was invented by whom? | Which person invented {s}? | Tell me who invented {s}. | Who made the first version of {s}?",
        "{s} was invented by {v}. | {v} invented {s}. | It was invented by {v}.",
    ),
    "discoverer": (
        """penicillin = Alexander Fleming; gravity = Isaac Newton; radium = Marie Curie; evolution = Charles Darwin; relativity = Albert Einstein; America = Christopher Columbus;
        X-rays = Wilhelm Roentgen; the moons of Jupiter = Galileo Galilei; the law of floating bodies = Archimedes; the laws of heredity = Gregor Mendel""",
        "Who discovered {s}? | Who is known for {s}? | Which person discovered {s}? | Tell me who discovered {s}. | {s} is connected with which person?",
        "{v} is known for {s}. | {v} discovered {s}. | It was {v}.",
    ),
    "artist": (
        """the Mona Lisa = Leonardo da Vinci; the Last Supper = Leonardo da Vinci; the Starry Night = Vincent van Gogh; the Scream = Edvard Munch; Guernica = Pablo Picasso;
        the Water Lilies = Claude Monet; the ceiling of the Sistine Chapel = Michelangelo; the Night Watch = Rembrandt; the Girl with a Pearl Earring = Johannes Vermeer;
        the Birth of Venus = Sandro Botticelli; the Kiss = Gustav Klimt; the Great Wave = Hokusai; the Sunflowers = Vincent van Gogh""",
        "Who painted {s}? | Which artist painted {s}? | {s} was painted by whom? | Tell me who painted {s}. | Who is the painter of {s}?",
        "{s} was painted by {v}. | {v} painted {s}. | It was painted by {v}.",
    ),
    "composer": (
        """the Magic Flute = Mozart; the Ninth Symphony = Beethoven; the Moonlight Sonata = Beethoven; the Four Seasons = Vivaldi; the Nutcracker = Tchaikovsky;
        Swan Lake = Tchaikovsky; the Messiah = Handel; the Brandenburg Concertos = Bach; Carmen = Bizet; Aida = Verdi; Peter and the Wolf = Prokofiev; the Blue Danube = Johann Strauss;
        Bolero = Ravel; the Planets = Gustav Holst""",
        "Who composed {s}? | Who wrote the music of {s}? | Which composer wrote {s}? | {s} was composed by whom? | Tell me who composed {s}.",
        "{s} was composed by {v}. | {v} composed {s}. | It was composed by {v}.",
    ),
    "profession": (
        """Albert Einstein = a physicist; Isaac Newton = a physicist; Marie Curie = a scientist; Charles Darwin = a naturalist; Mozart = a composer; Beethoven = a composer;
        Bach = a composer; William Shakespeare = a writer; Charles Dickens = a writer; Jane Austen = a writer; Mark Twain = a writer; Leonardo da Vinci = a painter and inventor;
        Vincent van Gogh = a painter; Pablo Picasso = a painter; Claude Monet = a painter; Galileo Galilei = an astronomer; Aristotle = a philosopher; Plato = a philosopher;
        Socrates = a philosopher; Abraham Lincoln = a president of the United States; George Washington = the first president of the United States; Napoleon = an emperor of France;
        Cleopatra = a queen of Egypt; Julius Caesar = a Roman general; Mahatma Gandhi = a leader of India; Nelson Mandela = a president of South Africa;
        Neil Armstrong = the first man on the moon; Ada Lovelace = a mathematician; Alan Turing = a mathematician; Florence Nightingale = a nurse; Louis Pasteur = a scientist;
        Archimedes = a Greek mathematician; Homer = a Greek poet; Christopher Columbus = an explorer; Marco Polo = a traveller; Yuri Gagarin = the first man in space""",
        "Who was {s}? | Who is {s}? | What was {s} known as? | Tell me who {s} was. | What did {s} do? | Who exactly was {s}?",
        "{s} was {v}. | {s} was {v}.",
    ),
    "use of a tool": (
        """cut paper = scissors; cut bread = a knife; eat soup = a spoon; write on paper = a pen; drive a nail into wood = a hammer; tell the time = a clock;
        sweep the floor = a broom; brush your teeth = a toothbrush; measure temperature = a thermometer; look at the stars = a telescope; open a lock = a key; dig a hole = a shovel;
        keep dry in the rain = an umbrella; boil water = a kettle; take photos = a camera; find the direction north = a compass; cut wood = a saw; turn a screw = a screwdriver;
        dry your hands = a towel; wash your hands = soap; keep food cold = a refrigerator; bake a cake = an oven; see very small things = a microscope; climb onto a roof = a ladder;
        measure length = a ruler; call a friend = a phone; sew a button = a needle; comb your hair = a comb; paint a picture = a brush; iron a shirt = an iron""",
        "What do you use to {s}? | What do I need to {s}? | Which thing do people use to {s}? | What can I use to {s}? | I want to {s}. What do I need? | "
        "What is used to {s}? | With what do you {s}?",
        "You use {v} to {s}. | You need {v}. | To {s}, you use {v}. | People use {v} to {s}.",
    ),
    "sense or organ": (
        """see = the eyes; hear = the ears; smell = the nose; taste = the tongue; think = the brain; breathe = the lungs; pump blood = the heart; digest food = the stomach;
        touch = the skin; walk = the legs; chew = the teeth; hold things = the hands; speak = the mouth""",
        "Which part of the body do we use to {s}? | What part of the body helps us {s}? | With which part of the body do we {s}? | What do we use to {s}? | Which body part is for this: {s}?",
        "We use {v} to {s}. | We {s} with {v}. | It is {v}.",
    ),
    "kind": (
        """rose = a flower; tulip = a flower; daisy = a flower; oak = a tree; pine = a tree; maple = a tree; birch = a tree; apple = a fruit; banana = a fruit;
        pear = a fruit; cherry = a fruit; carrot = a vegetable; potato = a vegetable; dog = an animal; cat = an animal; eagle = a bird; sparrow = a bird; owl
        = a bird; penguin = a bird; salmon = a fish; shark = a fish; trout = a fish; ant = an insect; bee = an insect; butterfly = an insect; beetle = an
        insect; snake = a reptile; lizard = a reptile; crocodile = a reptile; frog = an amphibian; whale = a mammal; dolphin = a mammal; bat = a mammal;
        violin = a musical instrument; piano = a musical instrument; flute = a musical instrument; drum = a musical instrument; trumpet = a musical
        instrument; hammer = a tool; saw = a tool; chair = a piece of furniture; table = a piece of furniture; bed = a piece of furniture; shirt = a piece of
        clothing; coat = a piece of clothing; car = a vehicle; bus = a vehicle; bicycle = a vehicle; diamond = a precious stone; ruby = a precious stone""",
        "What kind of thing is a {s}? | What sort of thing is a {s}? | What is a {s}: an animal, a plant or something else? | "
        "What type of thing is a {s}? | In which group does a {s} belong? | A {s} is what kind of thing?",
        "A {s} is {v}. | It is {v}. | A {s} is {v}.",
    ),
    "kind of stuff": (
        """spinach = a vegetable; gold = a metal; iron = a metal; copper = a metal; silver = a metal; red = a colour; blue = a colour; football = a sport; tennis
        = a sport; chess = a game; Mars = a planet; Venus = a planet; French = a language; German = a language; bread = a food; cheese = a food; tea = a
        drink; coffee = a drink; milk = a drink""",
        "What kind of thing is {s}? | What sort of thing is {s}? | What type of thing is {s}? | In which group does {s} belong? | {s} is what kind of thing?",
        "{s} is {v}. | It is {v}. | {s} is {v}.",
    ),
    "material": (
        """a window = glass; a book = paper; a tyre = rubber; a sweater = wool; a table = wood; a coin = metal; a candle = wax; bread = flour; cheese = milk; wine = grapes;
        butter = milk; chocolate = cocoa; a newspaper = paper; a bottle = glass; a shoe = leather; a snowman = snow; a ring = gold; jam = fruit; paper = wood; glass = sand; a brick = clay;
        a pot = clay; a nail = iron; yogurt = milk; a statue = stone; raisins = grapes""",
        "What is {s} made of? | From what is {s} made? | What material is {s} made of? | Tell me what {s} is made of. | {s} is made of what? | What do people make {s} from?",
        "{s} is made of {v}. | {s} is usually made of {v}. | It is made of {v}.",
    ),
    "animal product": (
        """cow = milk; bee = honey; sheep = wool; chicken = eggs; silkworm = silk; goat = milk; goose = feathers; oyster = pearls""",
        "What do we get from a {s}? | What does a {s} give us? | What product comes from a {s}? | What do people get from a {s}?",
        "We get {v} from a {s}. | A {s} gives us {v}. | It gives us {v}.",
    ),
    "job": (
        """teaches children = a teacher; flies planes = a pilot; bakes bread = a baker; puts out fires = a firefighter; treats ill people = a doctor; cuts hair = a barber; grows crops = a farmer;
        repairs cars = a mechanic; cares for teeth = a dentist; writes books = a writer; builds houses = a builder; catches fish = a fisherman; delivers letters = a postman;
        works in a library = a librarian; plays in films = an actor; treats sick animals = a vet; cooks in a restaurant = a cook; serves food = a waiter; travels into space = an astronaut;
        designs buildings = an architect; repairs water pipes = a plumber; makes clothes = a tailor; makes furniture = a carpenter; takes photos = a photographer""",
        "Who {s}? | What do you call a person who {s}? | What is the job of someone who {s}? | A person who {s} is called what? | Which job is it when somebody {s}?",
        "A person who {s} is {v}. | It is {v}. | {v} {s}.",
    ),
    "synonym": (
        """big = large; small = little; happy = glad; sad = unhappy; fast = quick; begin = start; end = finish; smart = clever; angry = mad; pretty = beautiful; scared = afraid; rich = wealthy;
        sick = ill; quiet = silent; hard = difficult; easy = simple; funny = amusing; strange = odd; choose = pick; shut = close; speak = talk; present = gift; correct = right;
        tired = sleepy; brave = courageous; famous = well-known; boring = dull; huge = enormous; tiny = very small; error = mistake; answer = reply; help = assist; buy = purchase""",
        "What is another word for {s}? | Give me a synonym of {s}. | Which word means the same as {s}? | What is a synonym for {s}? | Tell me another word for {s}. | Another way to say {s}?",
        'Another word for {s} is {v}. | It is {v}. | A synonym of {s} is {v}. | You can say "{v}".',
    ),
    "feminine": (
        """king = queen; prince = princess; father = mother; son = daughter; brother = sister; uncle = aunt; grandfather = grandmother; man = woman; boy = girl; husband = wife;
        actor = actress; waiter = waitress; nephew = niece; hero = heroine; lion = lioness; rooster = hen; bull = cow; emperor = empress; duke = duchess; wizard = witch""",
        "What is the female form of {s}? | What is the female word for {s}? | A male one is a {s}. What is a female one? | Give me the female form of {s}.",
        "The female form of {s} is {v}. | It is {v}.",
    ),
    "number in words": (
        """0 = zero; 1 = one; 2 = two; 3 = three; 4 = four; 5 = five; 6 = six; 7 = seven; 8 = eight; 9 = nine; 10 = ten; 11 = eleven; 12 = twelve; 13 = thirteen; 14 = fourteen; 15 = fifteen;
        16 = sixteen; 17 = seventeen; 18 = eighteen; 19 = nineteen; 20 = twenty; 30 = thirty; 40 = forty; 50 = fifty; 60 = sixty; 70 = seventy; 80 = eighty; 90 = ninety; 100 = one hundred""",
        "How do you write {s} in words? | Write {s} as a word. | What is {s} in words? | Spell the number {s}. | The number {s} in words, please.",
        "{s} in words is {v}. | It is {v}. | {s} is written {v}.",
    ),
    "greeting in a language": (
        """French = bonjour; Spanish = hola; German = hallo; Italian = ciao; Portuguese = ola; Japanese = konnichiwa; Swedish = hej; Dutch = hallo; Hawaiian = aloha""",
        "How do you say hello in {s}? | What is hello in {s}? | How do I greet somebody in {s}? | Say hello in {s}. | What is the word for hello in {s}?",
        'Hello in {s} is "{v}". | In {s}, you say "{v}". | It is "{v}".',
    ),
    "thanks in a language": (
        """French = merci; Spanish = gracias; German = danke; Italian = grazie; Portuguese = obrigado; Japanese = arigato; Swedish = tack; Dutch = dank je""",
        "How do you say thank you in {s}? | What is thank you in {s}? | How do I thank somebody in {s}? | Say thank you in {s}.",
        'Thank you in {s} is "{v}". | In {s}, you say "{v}". | It is "{v}".',
    ),
    "landmark": (
        """the Eiffel Tower = Paris; the Colosseum = Rome; Big Ben = London; the Statue of Liberty = New York; the Brandenburg Gate = Berlin; the Acropolis = Athens; the pyramids = Egypt;
        the Great Wall = China; the Taj Mahal = India; the Kremlin = Moscow; the Sagrada Familia = Barcelona; the Opera House with white sails = Sydney; Mount Fuji = Japan;
        the Louvre = Paris; Central Park = New York; the Leaning Tower = Pisa; Machu Picchu = Peru; the White House = Washington; Niagara Falls = North America; the Grand Canyon = the United States;
        Stonehenge = England; Loch Ness = Scotland; the Alps = Europe; the Himalayas = Asia; the Andes = South America; the Sahara = Africa""",
        "Where is {s}? | Where can I see {s}? | Where do you find {s}? | In which place is {s}? | Tell me where {s} is. | Where would I go to see {s}?",
        "You can find {s} in {v}. | {s} is in {v}. | It is in {v}. | You can see {s} in {v}.",
    ),
    "part of a year": (
        """the season after winter = spring; the season after spring = summer; the season after summer = autumn; the season after autumn = winter; the coldest season = winter;
        the hottest season = summer; the first month of the year = January; the last month of the year = December; the first day of the week = Monday; the season when leaves fall = autumn;
        the day after Friday = Saturday; the season with snow = winter; the meal in the morning = breakfast; the meal at noon = lunch; the meal in the evening = dinner;
        frozen water = ice; water that falls from clouds = rain; the star at the centre of the solar system = the sun; the gas we breathe = oxygen; the natural satellite of Earth = the moon;
        a shape with three sides = a triangle; a shape with four equal sides = a square; a round shape = a circle; the liquid in our veins = blood; the force that pulls things down = gravity;
        a doctor for animals = a vet; a house for books = a library; a word for a person's mother and father = parents; a baby's bed = a cradle; a person who rules a kingdom = a king""",
        "What is {s}? | What do you call {s}? | Tell me {s}. | What is the word for {s}? | Can you name {s}? | {s}: what is it?",
        "It is {v}. | That is {v}. | It is called {v}.",
    ),
}
